"""Recorders are isolated from the run, and the names of fields and keys in them are those that users know."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel import hooks
from retrain.kernel.config.load import TableEntry
from retrain.observe.trackers.recording import (
    CONSTANTS,
    Recorders,
    metric_name,
    named_config,
    named_metrics,
    recorder_names,
)
from tests.kit.tables import pairs

METHODS = ("start", "step", "checkpoint", "state", "restore", "finish")


class Diary:
    """Records its calls; raises in the methods named."""

    def __init__(self, *faulty: str, state: Any = None) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.faulty = faulty
        self.kept = state

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in METHODS:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            if name in self.faulty:
                raise RuntimeError(f"no {name}\x1b[2J\nat all")
            return self.kept if name == "state" else None

        return call


class Least:
    """A recorder without the optional methods."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def start(self, manifest: Mapping[str, Any], folder: Path) -> None:
        self.steps.clear()

    def step(self, metrics: Mapping[str, Any]) -> None:
        self.steps.append(metrics["step"])

    def finish(self, error: BaseException | None = None) -> None:
        pass


def run(recorders: Recorders, folder: Path, steps: int = 3, error: BaseException | None = None) -> None:
    """The life of a run, through the hooks."""
    manager = pluggy.PluginManager("retrain")
    manager.add_hookspecs(hooks)
    manager.register(recorders)
    view: Any = SimpleNamespace(manifest={"seed": 1}, folder=folder)
    manager.hook.retrain_run_start(run=view)
    for step in range(steps):
        manager.hook.retrain_step_end(run=view, metrics={"step": step})
        manager.hook.retrain_save_state(run=view, folder=folder, name=f"checkpoint_step_{step}")
    manager.hook.retrain_run_end(run=view, error=error)


def state_of(recorders: Recorders) -> dict[str, Any]:
    """What a checkpoint keeps."""
    kept: dict[str, Any] = recorders.retrain_save_state("final", None)["recorders"]
    return kept


def test_every_recorder_hears_everything_in_order(tmp_path: Path) -> None:
    diary, least = Diary(), Least()
    run(Recorders({"diary": diary, "least": least}), tmp_path, steps=1)
    assert diary.calls == [
        ("start", ({"seed": 1}, tmp_path)),
        ("step", ({"step": 0},)),
        ("checkpoint", (tmp_path, "checkpoint_step_0")),
        ("finish", (None,)),
    ]
    assert least.steps == [0]
    for error in (KeyboardInterrupt(), ValueError("x")):
        diary = Diary()
        run(Recorders({"x": diary}), tmp_path, error=error)
        assert diary.calls[-1] == ("finish", (error,))
    idle = Diary("start")
    run(Recorders({"x": idle}), tmp_path)
    assert idle.names() == ["start", "finish"], "what did not start is only finished"


@pytest.mark.parametrize("method", METHODS)
def test_a_fault_is_reported_once_by_name_and_the_others_continue(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = Diary(state={"n": 1})
    recorders = Recorders({"bad one": Diary(method, state={"n": 2}), "good": good})
    with caplog.at_level(logging.WARNING, "retrain"):
        recorders.retrain_load_state({"recorders": {"bad one": {"n": 0}, "good": {"n": 0}}})
        run(recorders, tmp_path)
        assert state_of(recorders)["good"] == {"n": 1}
    (line,) = caplog.messages
    assert line.startswith(f"Recorder 'bad one' failed in {method}(): RuntimeError: no {method}")
    assert line.isprintable()
    assert good.names() == ["restore", "start", *["step", "checkpoint"] * 3, "finish", "state"]


@pytest.mark.parametrize("state", [7, {"x": float("nan")}, {"x": object()}, [1]])
def test_a_state_that_is_not_json_is_left_out_of_the_checkpoint(state: Any, caplog: pytest.LogCaptureFixture) -> None:
    recorders = Recorders(
        {"odd": Diary(state=state), "good": Diary(state={"n": (1, 2)}), "none": Diary(), "l": Least()}
    )
    assert state_of(recorders) == {"good": {"n": [1, 2]}}
    assert "Recorder 'odd' failed in state()" in caplog.text


def test_only_recorders_of_both_sessions_are_restored() -> None:
    old, new = Diary(), Diary()
    recorders = Recorders({"old": old, "new": new, "least": Least()})
    recorders.retrain_load_state({"recorders": {"old": {"n": 1}, "gone": {}, "least": {}}})
    recorders.retrain_load_state({})
    assert (old.calls, new.calls) == ([("restore", ({"n": 1},))], [])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", []),
        ("recorders = ['a', 'b', 'a']", ["a", "b"]),
        ("wandb_project = 'p'", ["wandb"]),
        ("wandb_project = 'p'\nrecorders = ['tensorboard', 'wandb']", ["wandb", "tensorboard"]),
    ],
)
def test_a_wandb_project_turns_its_recorder_on_once(
    text: str, wanted: list[str], load: Callable[..., Any], tables: Mapping[str, TableEntry]
) -> None:
    config, problems = load(f"[logging]\n{text}\n")
    assert problems == []
    assert list(recorder_names(config)) == wanted


FIELDS = ("mean_reward", "reward_tie_groups", "backend_x", "bp_x", "eval_x", "exec_entropy_mean", "post_")


NAMES = pairs("""
    loss => loss  mean_reward => rewards/mean_reward  correct_rate => rewards/correct_rate
    running_correct_rate => rewards/running_correct_rate  reward_uniform_group_rate => rewards/uniform_group_rate
    reward_tie_eligible_groups => rewards/tie_eligible_groups
    reward_unique_fraction_mean => rewards/unique_fraction_mean  bp_p_star => backpressure/p_star
    backend_reports_sync_loss => backend/reports_sync_loss
    backend_preserves_token_advantages => backend/preserves_token_advantages
    exec_entropy_mean => entropy/exec_mean  plan_entropy_var => entropy/plan_var
    exec_surprisal_var => surprisal/exec_var  post_exec_surprisal_mean => surprisal/post_exec_mean
    post_plan_surprisal_var => surprisal/post_plan_var  post_plan_uncertainty_mean => uncertainty/post_plan_mean
    exec_surprisal_meanness => exec_surprisal_meanness  reward_length => reward_length
""")


@pytest.mark.parametrize(("field", "name"), NAMES)
def test_each_field_has_its_known_name(field: str, name: str) -> None:
    assert metric_name(field) == f"train/{name}"
    assert metric_name("eval_pass_at_4") == "eval/pass_at_4"


FIELD = st.one_of(st.from_regex(r"[a-z_]{1,12}", fullmatch=True), st.sampled_from(FIELDS))


@settings(max_examples=50)
@given(FIELD, FIELD)
def test_two_fields_never_share_a_name(one: str, other: str) -> None:
    assert (metric_name(one) == metric_name(other)) == (one == other)


def test_only_what_the_line_and_the_configuration_have_is_named() -> None:
    constants = dict.fromkeys(CONSTANTS, "x")
    line = {"step": 3, "loss": None, "mean_reward": 0.0, "sepa_gate_open": False, **constants}
    assert named_metrics(line) == {"train/rewards/mean_reward": 0.0, "train/sepa_gate_open": False}
    assert named_metrics({}) == {}
    manifest = {"seed": 7, "condition": "grpo+none", "config": {"training": {"lr": 0.1}, "gtpo": None}}
    assert named_config(manifest) == {"seed": 7, "condition": "grpo+none", "lr": 0.1}
