"""Conformance suites: what every plugin of a kind must do, as checks that its author's tests and ours both run.

import pytest
from retrain.testing import conformance

@pytest.mark.parametrize("check", conformance("transform", "entropy_floor"), ids=str)
def test_conforms(check):
    check()
"""

from retrain.testing.check import Check, ConformanceError
from retrain.testing.suites import conformance

__all__ = ["Check", "ConformanceError", "conformance"]
