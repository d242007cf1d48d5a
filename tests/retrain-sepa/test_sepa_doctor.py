"""What `retrain doctor` reports about this distribution: its one extra, needed by one detector."""

from __future__ import annotations

import pytest

from retrain.api import Config
from retrain_sepa.plugin import retrain_diagnose
from retrain_sepa.tables import PlanningTable


@pytest.mark.parametrize(("detector", "needed"), [("semantic", True), ("regex", False)])
def test_the_semantic_detector_alone_needs_the_extra(detector: str, needed: bool) -> None:
    (finding,) = retrain_diagnose(Config(tables={"planning": PlanningTable(detector=detector)}))
    assert (finding.name, finding.needed) == ("retrain-sepa[semantic]", needed)


def test_without_a_configuration_nothing_is_needed() -> None:
    (finding,) = retrain_diagnose(None)
    assert not finding.needed
