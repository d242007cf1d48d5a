"""The monitor `default`: what it reports as a fault, from which step on, and what it ignores."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.observe.health.contract import HealthTable
from retrain.observe.health.monitors import DefaultMonitor

GOOD: dict[str, Any] = {
    "max_token_hit_rate": 0.1,
    "useful_groups": 3,
    "all_wrong_groups": 1,
    "all_right_groups": 0,
    "tied_groups": 0,
    "no_verdict_groups": 0,
    "exec_entropy_mean": 0.5,
    "mean_tokens": 40.0,
    "ratio_mean": 1.0,
    "ratio_max": 1.01,
    "ess_frac": 1.0,
}
NONE_USEFUL = {"useful_groups": 0, "all_wrong_groups": 0}
STUCK = {"useful_groups": 1, "all_wrong_groups": 3}
FAULTS = [
    ("truncation", {"max_token_hit_rate": 0.91}, "91 % of the completions", "[training] max_tokens"),
    ("no_useful_groups", NONE_USEFUL | {"all_wrong_groups": 4}, "12 all wrong", "easier tasks"),
    ("no_useful_groups", NONE_USEFUL | {"all_right_groups": 4}, "12 all right", "harder tasks"),
    ("no_useful_groups", {"useful_groups": 0, "no_verdict_groups": 3}, "9 no verdict, 3 all wrong", "[reward] type"),
    ("no_useful_groups", NONE_USEFUL | {"tied_groups": 4}, "12 all same", "[training] group_size"),
    ("entropy_collapse", STUCK | {"exec_entropy_mean": 0.04}, "from 0.5 to 0.04", "[training] lr"),
    ("entropy_explosion", {"exec_entropy_mean": 2.6}, "from 0.5 to 2.6", "[training] lr"),
    ("length_drift", {"mean_tokens": 3.0}, "from 40.0 to 3.0", "[reward] type"),
    ("ratio_drift", {"ratio_mean": 1.2}, "ratio_mean 1.200", "[algorithm] tis_cap"),
    ("ratio_drift", {"ratio_mean": 0.8}, "ratio_mean 0.800", "[algorithm] tis_cap"),
    ("ratio_drift", {"ess_frac": 0.4}, "ess_frac 0.40", "[algorithm] tis_cap"),
]
EDGES: list[dict[str, Any]] = [
    {"max_token_hit_rate": 0.9},
    {"useful_groups": 1, "all_wrong_groups": 3},
    {"exec_entropy_mean": 0.05},
    {"exec_entropy_mean": 2.5},
    {"mean_tokens": 4.0},
    {"ratio_mean": 1.0999},
    {"ess_frac": 0.5},
]


def monitor(**thresholds: Any) -> DefaultMonitor:
    return DefaultMonitor(HealthTable(**thresholds), max_tokens=64)


def states(watcher: DefaultMonitor, *steps: dict[str, Any]) -> list[list[str]]:
    return [[finding.state for finding in watcher.observe(GOOD | step)] for step in steps]


@pytest.mark.parametrize(("state", "fault", "cause", "fix"), FAULTS)
def test_a_fault_is_found_at_its_third_step_and_until_it_goes(
    state: str, fault: dict[str, Any], cause: str, fix: str
) -> None:
    watcher = monitor()
    assert states(watcher, {}, {}, {}, fault, fault) == [[]] * 5
    (finding,) = watcher.observe(GOOD | fault)
    assert (finding.state, finding.severity) == (state, "warn")
    assert finding.message.startswith("3 steps in a row: ")
    assert cause in finding.message
    assert fix in finding.message
    assert states(watcher, fault, {}, fault, fault, fault) == [[state], [], [], [], [state]]


@pytest.mark.parametrize("edge", EDGES)
def test_the_threshold_itself_is_not_a_fault(edge: dict[str, Any]) -> None:
    assert states(monitor(), {}, {}, {}, edge, edge, edge, edge) == [[]] * 7


def test_surprisal_replaces_missing_entropy() -> None:
    watcher = monitor(steps=1)
    plain = {name: value for name, value in GOOD.items() if name != "exec_entropy_mean"}
    assert watcher.observe(plain | {"exec_surprisal_mean": 1.0}) == []
    assert [f.state for f in watcher.observe(plain | STUCK | {"exec_surprisal_mean": 0.01})] == ["entropy_collapse"]


@pytest.mark.parametrize("counts", [{"useful_groups": 0, "all_right_groups": 4, "all_wrong_groups": 0}, {}])
def test_solving_a_task_is_not_a_collapse(counts: dict[str, Any]) -> None:
    found = states(monitor(), {}, {}, {}, *[counts | {"exec_entropy_mean": 0.01}] * 4)
    assert not [state for step in found for state in step if state == "entropy_collapse"]


def test_a_step_without_the_fields_neither_extends_nor_breaks_a_row() -> None:
    watcher, cut = monitor(), GOOD | {"max_token_hit_rate": 1.0}
    rejected = {"step": 2, "loss": None, "rejected": "logits of nan"}
    assert [bool(watcher.observe(step)) for step in (cut, rejected, cut, rejected, cut)] == [False] * 4 + [True]


def test_thresholds_of_zero_and_one_disable_a_fault() -> None:
    watcher = monitor(
        steps=1, truncation=1.0, entropy_collapse=0.0, entropy_explosion=0.0, length_collapse=0.0, ratio_drift=0.0,
        ess_frac=0.0,
    )  # fmt: skip
    worst = {"max_token_hit_rate": 1.0, "mean_tokens": 0.0, "ratio_mean": 9.0, "ess_frac": 0.01}
    assert states(watcher, {}, worst | {"exec_entropy_mean": 0.0}, worst | {"exec_entropy_mean": 90.0}) == [[]] * 3


STEP = st.fixed_dictionaries(
    {},
    optional={
        "max_token_hit_rate": st.sampled_from([0.0, 0.9, 1.0]),
        "useful_groups": st.sampled_from([0, 2]),
        "all_wrong_groups": st.integers(0, 4),
        "exec_entropy_mean": st.sampled_from([0.0, 0.01, 0.5, 5.0]),
        "mean_tokens": st.sampled_from([0.5, 40.0]),
        "ratio_mean": st.sampled_from([1.0, 1.5]),
        "ess_frac": st.sampled_from([0.1, 1.0]),
    },
)


@given(st.lists(STEP, max_size=12), st.integers(0, 12))
def test_a_resumed_monitor_finds_the_same(steps: list[dict[str, Any]], cut: int) -> None:
    whole = monitor()
    wanted = [whole.observe(step) for step in steps]
    first, second = monitor(), monitor()
    found = [first.observe(step) for step in steps[:cut]]
    second.restore(json.loads(json.dumps(first.state(), allow_nan=False)))
    assert found + [second.observe(step) for step in steps[cut:]] == wanted
