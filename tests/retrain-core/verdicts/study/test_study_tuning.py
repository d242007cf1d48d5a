"""The view of a search: budgets that differ, the best value at the edge, and failed configurations."""

import pytest

from retrain.records.runs.curves import Direction
from retrain.records.runs.source import Source
from retrain.records.runs.tuning import read_tuning
from retrain.verdicts.study.tuning import tuning_view


def tuned(values, *, budget=4, label="a", rates=(0.001, 0.002, 0.003, 0.004)):
    trials = [
        {"for_seed": number // 4, "number": number % 4, "values": {"training.lr": lr}, "value": value}
        for number, (lr, value) in enumerate(zip(rates, values, strict=False))
    ]
    conditions = {label: {"tokens": 5, "trials": trials, "chosen": [{"for_seed": 1, "values": {"training.lr": 0.001}}]}}
    tuning = {"metric": "eval_correct_rate:final", "runs": budget, "seeds": [7]}
    return read_tuning({"tuning": {**tuning, "keys": {"training.lr": "0.001 to 0.1"}, "conditions": conditions}})


def view(*tunings, direction=Direction.HIGHER, labels=("a", "b")):
    merged = {label: each for tuning in tunings for label, each in tuning.items()}
    source = Source(campaign=None, conditions=labels, candidates=(), plan=None, tuning=merged)
    return tuning_view(source, (), direction, ())


def test_different_budgets_are_a_sentence_and_equal_ones_are_not():
    assert view(labels=("a",)) is None
    assert view(tuned([0.1])).unequal("a", "b") == "Not tuned alike: a with 4 runs; b not at all"
    assert view(tuned([0.1]), tuned([0.1], label="b")).unequal() == ""
    assert view(tuned([0.1]), tuned([0.1], label="b", budget=8)).unequal() == (
        "Not tuned alike: a with 4 runs; b with 8 runs"
    )


@pytest.mark.parametrize(
    ("values", "direction", "end"),
    [
        ([0.1, 0.2, 0.3, 0.4], Direction.HIGHER, "largest"),
        ([0.1, 0.2, 0.3, 0.4], Direction.LOWER, "smallest"),
        ([0.1, 0.9, 0.3, 0.4], Direction.HIGHER, ""),
        ([0.1, 0.9, 0.3, None], Direction.HIGHER, ""),
    ],
)
def test_a_best_value_at_the_edge_of_those_tried_asks_for_a_wider_range(values, direction, end):
    edges = view(tuned(values), direction=direction).conditions[0].edges
    assert len(edges) == bool(end)
    assert all(f"is the {end} tried (0.001 to 0.1): widen the range" in each for each in edges)


def test_a_failed_configuration_counts_as_the_worst():
    found = view(tuned([0.1, 0.5, None, 0.3])).conditions[0]
    assert (found.num_tried, found.num_failed, list(found.curve)) == (4, 1, [1, 2, 4])
    assert found.curve[1][0] == pytest.approx((0.1 + 0.5 + 0.1 + 0.3) / 4)
    lower = view(tuned([0.1, 0.5, None, 0.3]), direction=Direction.LOWER).conditions[0]
    assert lower.curve[1][0] == pytest.approx((0.1 + 0.5 + 0.5 + 0.3) / 4)
    assert all(low <= mean <= high for mean, (low, high) in lower.curve.values())


def test_damaged_records_count_as_absent():
    assert read_tuning({"tuning": {"conditions": {"a": 3, "b": {}}, "runs": "x", "seeds": 4}}).keys() == {"b"}
    assert read_tuning({"tuning": []}) == {}
