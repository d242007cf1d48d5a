"""Conformance suites: the contract of every kind of plugin as checks, for its author's tests and for our own.

import pytest
from retrain.testing import conformance

@pytest.mark.parametrize("check", conformance("transform", "entropy_floor"), ids=str)
def test_conforms(check):
    check()
"""

from retrain.testing.check import Check, ConformanceError
from retrain.testing.suites import conformance

__all__ = ["Check", "ConformanceError", "conformance"]
