"""Fields of the optimizer step, and what may be merged into a line."""

from __future__ import annotations

import numpy as np
import pytest

from retrain.kernel.errors import PluginError
from retrain.kernel.progress import merge_fields, train_fields
from tests.kit.problems import codes_in


def test_a_step_without_training_has_no_loss() -> None:
    expected = {"loss": None, "reported_loss": None, "loss_is_placeholder": False, "trained_tokens": 0, "updates": 0}
    assert train_fields(None) == expected


def test_extra_metrics_are_merged_and_faulty_ones_refused() -> None:
    merged = merge_fields({"a": 1}, {"b": np.float32(2.0), "c": "text"}, source="x")
    assert merged == {"a": 1, "b": 2.0, "c": "text"}
    assert type(merged["b"]) is float
    not_finite = [("b", value, "plugin.metric-not-finite") for value in (float("nan"), np.float32("inf"))]
    wrong_type = [("b", value, "plugin.metric-type") for value in ([1.0], None)]
    for name, value, code in (("a", 2, "plugin.metric-twice"), *not_finite, *wrong_type):
        with pytest.raises(PluginError) as caught:
            merge_fields({"a": 1}, {name: value}, source="x")
        assert codes_in(caught) == [code]
