"""Console lines, and nothing in them that could steer a terminal."""

from __future__ import annotations

import io
import logging
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from retrain.kernel.config.schema import TrainingTable
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.plugins.manager import Plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Group
from retrain.rooms.terminal.lines import RunLines, evaluation, group_lines, step_line, training_complete
from retrain.rooms.terminal.panel import LiveDisplay
from retrain.rooms.terminal.progress_lines import ProgressLines
from retrain.rooms.text.terminal_text import GROUP_LEVEL, OUTCOME_LEVEL, duration, printable

MakeGroup = Callable[..., Group]
METRICS: dict[str, Any] = {
    "step": 3,
    "condition": "maxrl+gtpo_sepa",
    "loss": -0.00123,
    "loss_is_placeholder": False,
    "mean_reward": 0.25,
    "correct_rate": 0.25,
    "num_datums": 16,
    "batch_size": 4,
    "group_size": 8,
    "useful_groups": 2,
    "sepa_lambda": 0.1,
    "step_time_s": 1.25,
}


@pytest.fixture
def context(load: Callable[..., Any], plugins: Plugins) -> PluginContext:
    return PluginContext(config=load("")[0], seeds=Seeds(1), plugins=plugins)


@pytest.mark.parametrize(
    "text",
    ["\x1b[2J", "a\r\nb", "\x07", "\x9b31m", "\u202eevil", "\u200b", "\x00", "\x7f", "\u2028", "\ud800", "\ufeff"],
)
def test_control_characters_are_replaced(text: str) -> None:
    shown = printable(text)
    assert len(shown) == len(text)
    assert shown.isprintable()
    assert shown.encode()


@given(st.text())
def test_printable_text_is_kept_and_anything_else_is_not(text: str) -> None:
    shown = printable(text)
    assert all(now == was or (not was.isprintable() and now == "\ufffd") for was, now in zip(text, shown, strict=True))
    assert printable(shown) == shown


def test_group_lines_name_the_reason_of_a_skip(make_group: MakeGroup) -> None:
    groups = [make_group(1, 0), make_group(1, 1), make_group(0, 0), make_group(0.5, 0.5), make_group(None, None)]
    lines = group_lines(groups)
    assert lines == [
        "  group: 1/2 correct | answer=7",
        "  group: 2/2 correct | answer=7",
        "    -> skipped (all correct)",
        "  group: 0/2 correct | answer=7",
        "    -> skipped (all wrong)",
        "  group: 0/2 correct | answer=7",
        "    -> skipped (all same, reward=0.5)",
        "  group: 0/2 correct | answer=7",
        "    -> skipped (no verdict)",
    ]


def test_a_tie_beside_a_missing_verdict_shows_the_tied_reward(make_group: MakeGroup) -> None:
    group = make_group(None, 0.5, 0.5)
    assert group_lines([group])[1] == "    -> skipped (all same, reward=0.5)"


def test_answers_are_cut_and_cleaned(make_group: MakeGroup) -> None:
    group = make_group(1, 0, reference="\x1b[31m" + "x" * 100)
    (line,) = group_lines([group])
    answer = line.partition("answer=")[2]
    assert answer == "\ufffd[31m" + "x" * 32 + "..."
    assert len(answer) == 40


def test_the_step_line() -> None:
    assert step_line(METRICS) == (
        "Step 3 [maxrl+gtpo_sepa] | loss=-0.0012 | reward=0.250 | correct=25.0% | datums=16 | bs=4 | gs=8 | useful=2/4"
        " | sepa_l=0.1000 | time=1.2s"
    )


def test_the_step_line_without_loss_or_reward() -> None:
    rest = {name: value for name, value in METRICS.items() if name != "mean_reward"}
    line = step_line(rest | {"loss": None})
    assert line.startswith("Step 3 [maxrl+gtpo_sepa] | no informative datums, skipping | reward=none | ")
    assert "loss=-0.0012 (placeholder)" in step_line(METRICS | {"loss_is_placeholder": True})


def test_groups_that_were_not_useful_are_explained() -> None:
    counts = {"all_wrong_groups": 3, "all_right_groups": 2, "tied_groups": 0, "no_verdict_groups": 0}
    assert "useful=11/16 (3 all wrong, 2 all right) |" in step_line(
        METRICS | counts | {"useful_groups": 11, "batch_size": 16}
    )
    others = {"all_wrong_groups": 0, "all_right_groups": 0, "tied_groups": 1, "no_verdict_groups": 1}
    assert "useful=2/4 (1 all same, 1 no verdict) |" in step_line(METRICS | others)
    refilled = {"rounds": 3, "sampled_tokens": 5120, "dropped_tokens": 4096}
    assert "| rounds=3 (80% of 5,120 tokens dropped) |" in step_line(METRICS | refilled)


def test_a_rejected_step_says_so_with_or_without_completions() -> None:
    assert step_line(METRICS | {"loss": None, "rejected": "the loss is nan"}).startswith(
        "Step 3 [maxrl+gtpo_sepa] | rejected: the loss is nan | reward=0.250"
    )
    bare = {"step": 3, "condition": "maxrl+gtpo_sepa", "loss": None, "rejected": "logits of nan"}
    assert step_line(bare) == "Step 3 [maxrl+gtpo_sepa] | rejected: logits of nan"


def test_the_other_lines() -> None:
    metrics = {
        "eval_correct_rate": 0.484,
        "eval_ci_low": 0.421,
        "eval_ci_high": 0.547,
        "eval_pass_at_1": 0.484,
        "eval_pass_at_16": 0.813,
        "eval_pass_at_4": 0.7,
        "eval_examples": 64,
        "eval_samples": 16,
    }
    expected = "correct=48.4% [42.1, 54.7] | pass@16=81.3% | 64 held-out examples x 16"
    assert evaluation(metrics | {"step": -1}) == f"Eval before training | {expected}"
    assert evaluation(metrics | {"step": 9}) == f"Eval after step 9 | {expected}"
    assert training_complete("a+b", 3, 0.5) == "Training complete. a+b, 3 steps, running correct rate: 50.0%"


GRADED = {
    "reward_p10": 0.1,
    "reward_p50": 0.25,
    "reward_p90": 1.0,
    "reward_math_mean": 0.5,
    "reward_my.\x1b[31mown_mean": 0.125,
    "reward_unique_fraction_mean": 0.3,
}


def test_graded_rewards_and_their_parts_are_shown_beside_the_correct_rate() -> None:
    shown = "reward=0.250 (p10 0.1, p50 0.25, p90 1) | math=0.500 my.\ufffd[31mown=0.125"
    assert f" | {shown} | correct=25.0% | " in step_line(METRICS | GRADED)
    plain = {"reward_p10": 0.0, "reward_p50": 0.0, "reward_p90": 1.0, "reward_unique_fraction_mean": 0.3}
    assert step_line(METRICS | plain) == step_line(METRICS), "0 and 1 alone: the rate says it all"
    metrics = {"step": 9, "eval_correct_rate": 0.25, "eval_ci_low": 0.2, "eval_ci_high": 0.3, "eval_pass_at_1": 0.25}
    metrics |= {"eval_examples": 8, "eval_samples": 1, "eval_mean_reward": 0.25}
    assert "reward=" not in evaluation(
        metrics | {"eval_reward_p10": 0.0, "eval_reward_p50": 0.0, "eval_reward_p90": 1.0}
    )
    line = evaluation(metrics | {f"eval_{name}": value for name, value in GRADED.items() if "unique" not in name})
    assert line.startswith(f"Eval after step 9 | correct=25.0% [20.0, 30.0] | {shown} | pass@1=25.0%")


def test_the_panel_shows_them_too() -> None:
    display = LiveDisplay(Console(width=120, file=io.StringIO()))
    display.retrain_run_start(SimpleNamespace(condition="a+b", config=SimpleNamespace(training=TrainingTable())))
    display.retrain_step_end(METRICS)
    assert "reward" not in panel(display)
    held_out = {"eval_correct_rate": 0.5, "eval_mean_reward": 0.75, "eval_reward_p50": 0.7}
    display.retrain_step_end(METRICS | GRADED | held_out)
    shown = panel(display)
    assert "  reward=0.250 (p10 0.1, p50 0.25, p90 1)  math=0.500 my." in shown
    assert "  held-out 50.0%  reward=0.750 (p50 0.7)\n" in shown
    assert "rounds" not in shown
    display.retrain_step_end(METRICS | {"rounds": 2, "sampled_tokens": 640, "dropped_tokens": 160})
    assert "\n  rounds 2, 25% of 640 tokens dropped\n" in panel(display)
    assert f"time left: {duration(498 * METRICS['step_time_s'])}\n" in shown


@pytest.mark.parametrize(("rank", "what"), [(32, "Adapter"), (0, "Model")])
def test_the_last_lines_name_what_was_saved(
    context: PluginContext, caplog: pytest.LogCaptureFixture, tmp_path: Path, rank: int, what: str
) -> None:
    caplog.set_level(logging.INFO, logger="retrain")
    lines = RunLines(context)
    lines.retrain_checkpoint_saved(tmp_path / "adapter/final")
    config = SimpleNamespace(model=SimpleNamespace(lora_rank=rank), training=TrainingTable())
    run: Any = SimpleNamespace(condition="a+b", config=config, folder=tmp_path, manifest={})
    lines.retrain_run_end(run, None)
    assert caplog.messages[1] == f"{what} saved to {tmp_path / 'adapter/final'}"


def test_the_panel_says_how_far_the_phase_has_come(context: PluginContext) -> None:
    display = LiveDisplay(Console(width=120, file=io.StringIO()))
    display.retrain_watch_run(context)
    display.retrain_run_start(SimpleNamespace(condition="a+b", config=SimpleNamespace(training=TrainingTable())))
    display.retrain_phase("sampling")
    assert "completions" not in panel(display)
    context.sampling_progress.begin("completions", 4, limit=8)
    context.sampling_progress.add(1, tokens=8)
    context.sampling_progress.started -= 10.0
    assert re.search(r"\n  1/4 completions, 8 tokens, 1 tokens/s, about 3\d s left\n", panel(display))
    context.sampling_progress.begin("completions", 4)
    context.sampling_progress.add(4)
    assert "\n  4/4 completions\n" in panel(display)
    display.retrain_phase("sampling")
    assert "completions" not in panel(display), "those of the step before"


@pytest.mark.parametrize(("level", "is_shown"), [(GROUP_LEVEL, True), (logging.INFO, False), (OUTCOME_LEVEL, False)])
def test_where_there_is_no_panel_a_silent_run_says_what_it_is_doing(
    context: PluginContext, caplog: pytest.LogCaptureFixture, level: int, is_shown: bool
) -> None:
    caplog.set_level(level, logger="retrain")
    lines = ProgressLines(context, silence_s=0.01)
    context.training_progress.begin("packs", 4)
    context.training_progress.add(1)
    context.training_progress.started -= 10.0
    lines.enter(3, "training")
    lines.start()
    while is_shown and len(caplog.messages) < 2:  # the test's time limit ends a wait in vain
        time.sleep(0.01)
    lines.enter(-1, "eval")
    while is_shown and not caplog.messages[-1].startswith("  eval"):
        time.sleep(0.01)
    lines.end()
    said = list(caplog.messages)
    if is_shown:
        assert re.fullmatch(r"  training, step 3, for [\d.]+ m?s: 1/4 packs, about 3\d s left", said[0]), said
        assert re.fullmatch(r"  eval, before training, for [\d.]+ m?s", said[-1])
    assert bool(said) is is_shown
    assert not [thread for thread in threading.enumerate() if thread.name == "retrain-progress"]


def test_a_run_that_is_not_silent_says_nothing_more(context: PluginContext, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(GROUP_LEVEL, logger="retrain")
    watcher = RunLines(context)
    assert watcher._progress._silence_s == 30.0
    watcher._progress = ProgressLines(context, silence_s=1000.0)
    watcher._progress.last_line -= 2000.0
    watcher.retrain_run_start()
    watcher.retrain_phase(0, "training")
    watcher._progress.end()
    assert caplog.messages == []


def panel(display: LiveDisplay) -> str:
    console = Console(width=120, file=io.StringIO())
    console.print(display.picture())
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"
