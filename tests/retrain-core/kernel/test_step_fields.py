"""Fields of the optimizer step, and what may be merged into a line."""

from __future__ import annotations

import numpy as np
import pytest

from retrain.kernel.errors import PluginError
from retrain.kernel.progress import merge_fields, train_fields


def test_a_step_without_training_has_no_loss() -> None:
    assert train_fields(None) == {
        "loss": None,
        "reported_loss": None,
        "loss_is_placeholder": False,
        "trained_tokens": 0,
        "updates": 0,
    }


def test_extra_metrics_are_merged_and_faulty_ones_refused() -> None:
    merged = merge_fields({"a": 1}, {"b": np.float32(2.0), "c": "text"}, source="x")
    assert merged == {"a": 1, "b": 2.0, "c": "text"}
    assert type(merged["b"]) is float
    with pytest.raises(PluginError, match="'a' of x exists already"):
        merge_fields({"a": 1}, {"a": 2}, source="x")
    for faulty, shown in (
        (float("nan"), "is nan"),
        (np.float32("inf"), "is inf"),
        ([1.0], "is list"),
        (None, "NoneType"),
    ):
        with pytest.raises(PluginError, match=shown):
            merge_fields({"a": 1}, {"b": faulty}, source="x")
