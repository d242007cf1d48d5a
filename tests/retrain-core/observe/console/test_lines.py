"""Lines of console, log, panel and notebook, and nothing in them that could steer a terminal or a page."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from retrain.kernel.config.schema import TrainingTable
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.registry import Plugins
from retrain.kernel.seeding import Seeds
from retrain.observe.console import panel as panel_module
from retrain.observe.console.console import (
    ProgressLines,
    RunLines,
    held_out_line,
    is_notebook,
    next_commands,
    run_console,
)
from retrain.observe.console.panel import AboveThePanel, LiveDisplay
from retrain.observe.console.step_lines import COLUMNS, evaluation, step_line, training_complete, with_parts
from retrain.records.run import Run
from retrain.text.amounts import duration
from retrain.text.terminal_text import BLOCKS, OUTCOME_LEVEL, PROGRESS_LEVEL, printable, program, sparkline

ALL_KINDS = ("sepa", "kl", "teacher", "refill", "graded", "parts", "placeholder")
Patch = pytest.MonkeyPatch
Printed = pytest.CaptureFixture[str]
METRICS: dict[str, Any] = {"step": 3, "condition": "maxrl+gtpo_sepa", "loss": -0.00123, "loss_is_placeholder": False}
METRICS |= {"step_time_s": 1.25, "mean_reward": 0.25, "correct_rate": 0.25, "sepa_lambda": 0.1, "num_datums": 16}
METRICS |= {"batch_size": 4, "group_size": 8, "useful_groups": 2}
PLAIN = {name: value for name, value in METRICS.items() if name != "sepa_lambda"} | {"condition": "grpo+none"}
EVALUATED = {"eval_correct_rate": 0.473, "eval_ci_low": 0.412, "eval_ci_high": 0.534}
HELD_OUT = EVALUATED | {"eval_examples": 64, "eval_samples": 16, "eval_pass_at_1": 0.484, "eval_pass_at_4": 0.7}
GRADED = {
    "reward_p10": 0.1,
    "reward_p50": 0.25,
    "reward_p90": 1.0,
    "reward_unique_fraction_mean": 0.3,
    "reward_math_mean": 0.5,
    "reward_my.\x1b[31mown_mean": 0.125,
}


@pytest.fixture
def context(load: Callable[..., Any], plugins: Plugins) -> PluginContext:
    return PluginContext(config=load("")[0], seeds=Seeds(1), plugins=plugins)


def run_of(folder: Path = Path("none"), rank: int = 8) -> Any:
    config = SimpleNamespace(model=SimpleNamespace(lora_rank=rank, model="some/model"), training=TrainingTable())
    return SimpleNamespace(condition="a+b", config=config, folder=folder, manifest={})


def panel(display: LiveDisplay, width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(display.picture())
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


@given(
    st.text() | st.sampled_from(["\x1b[2J", "a\r\nb", "\x9b31m", "\u202eevil", "\u200b", "\x00\x7f", "\ud800\ufeff"])
)
def test_printable_text_is_kept_and_every_other_character_is_replaced(text: str) -> None:
    shown = printable(text)
    assert all(now == was or (not was.isprintable() and now == "\ufffd") for was, now in zip(text, shown, strict=True))
    assert shown.isprintable()
    assert shown.encode().decode() == shown


@given(values=st.lists(st.floats(-2, 3), max_size=200), width=st.integers(1, 80))
def test_any_curve_fits_the_width_and_every_height_has_its_block(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) <= min(width, len(values))
    assert set(line) <= set(BLOCKS)
    assert sparkline([i / 8 for i in range(8)]) == BLOCKS


REST = " | sepa_l=0.100 | time=1.2s"
HEAD = "Step 3 [maxrl+gtpo_sepa] | correct=25.0% | "
IDLE = {"loss": None}
WHY = "a gradient is not finite " * 8


LONG = METRICS | {"condition": "dapo~advantage_mode=maxrl,transform_mode=gtpo_sepa", "rounds": 1}
COUNTED = {"useful_groups": 11, "batch_size": 16, "all_wrong_groups": 3, "all_right_groups": 2}
PARTS = {"condition": "a", "loss": 0.5, "reward_p50": 0.25, "reward_math_mean": 0.5}
KL = {"sepa_lambda": 0.0, "kl_mean": 0.01, "useful_groups": 10, "batch_size": 16}
UNJUDGED = {name: value for name, value in METRICS.items() if name != "mean_reward"}
TIED = {"tied_groups": 1, "no_verdict_groups": 1}
REFILLED = {"rounds": 3, "sampled_tokens": 5120, "dropped_tokens": 4096}
BINARY = {"reward_p10": 0.0, "reward_p50": 0.0, "reward_p90": 1.0, "reward_unique_fraction_mean": 0.3}
LINES = [  # what begins with "Step" is the whole line
    (METRICS, f"{HEAD}loss=-0.0012 | useful=2/4{REST}"),
    (METRICS | BINARY, f"{HEAD}loss=-0.0012 | useful=2/4{REST}"),
    (METRICS | {"mean_reward": 0.4}, f"{HEAD}reward=0.400 | loss=-0.0012 | useful=2/4 | time=1.2s"),
    (PLAIN, "Step 3 [grpo+none] | correct=25.0% | loss=-0.0012 | useful=2/4 | time=1.2s | datums=16 | bs=4 | gs=8"),
    (METRICS | KL, f"{HEAD}loss=-0.0012 | useful=10/16 | kl=0.0100 | time=1.2s"),
    ({"step": 3, "condition": "a+b", **IDLE, "rejected": "logits of nan"}, "Step 3 [a+b] | rejected: logits of nan"),
    (
        METRICS | GRADED | {"condition": "a"},
        f"Step 3 [a] | correct=25.0% | reward=0.250 | loss=-0.0012 | useful=2/4{REST}",
    ),
    (PLAIN | PARTS, "[a] | correct=25.0% | reward=0.250 | math=0.500 | loss=0.5000 | useful=2/4 | time=1.2s | bs=4"),
    (
        PLAIN | IDLE | {"rejected": "nan"},
        " | correct=25.0% | rejected: nan | useful=2/4 | time=1.2s | datums=16 | bs=4",
    ),
    (LONG, "3 [dapo~advantage_mode=max…] |"),
    (METRICS | {"loss_is_placeholder": True}, "loss=-0.0012 (placeholder)"),
    (METRICS | IDLE | {"useful_groups": 0, "all_wrong_groups": 4}, "useful=0/4 (4 wrong) | no informative datums"),
    (
        UNJUDGED | IDLE,
        "Step 3 | correct=25.0% | reward=none | useful=2/4 | no informative datums, skipping | sepa_l=0.100",
    ),
    (PLAIN | COUNTED, "useful=11/16 (3 wrong, 2 right) |"),
    (PLAIN | TIED, "useful=2/4 (1 same, 1 no verdict) |"),
    (PLAIN | REFILLED, "| rounds=3 (80% dropped) |"),
    (METRICS | {"rejected": WHY}, f" | rejected: {WHY} | "),  # never shortened
]


@pytest.mark.parametrize(("metrics", "line"), LINES)
def test_the_step_line(metrics: dict[str, Any], line: str) -> None:
    shown = step_line(metrics)
    assert line == shown if line.startswith("Step") else line in shown


SMALL = st.floats(0, 9.9999) | st.just(9.9999)
SIZES = {
    "step": st.integers(0, 99_999),
    "condition": st.text("abc_+", min_size=4, max_size=40),
    "correct_rate": st.floats(0, 1) | st.just(1.0),
    "step_time_s": st.floats(0, 9_999.9) | st.just(9_999.9),
    "batch_size": st.integers(1, 1_024),
    **dict.fromkeys(("all_wrong_groups", "all_right_groups", "tied_groups", "no_verdict_groups"), st.integers(0, 999)),
}
LARGEST = {"step": 99_999, "condition": "dr_grpo_normalised+gtpo_hicra_pooled", "correct_rate": 1.0}
LARGEST |= {"step_time_s": 9_999.9, "batch_size": 1_024}
LARGEST |= dict.fromkeys(("all_wrong_groups", "all_right_groups", "tied_groups", "no_verdict_groups"), 999)


@settings(max_examples=40)
@given(sizes=st.fixed_dictionaries(SIZES), small=SMALL, kinds=st.sets(st.sampled_from(ALL_KINDS)))
@example(sizes=LARGEST, small=9.9999, kinds=set(ALL_KINDS))
def test_every_step_and_evaluation_fits_a_hundred_columns(sizes: dict[str, Any], small: float, kinds: set[str]) -> None:
    step, rate, time_s, prompts = (sizes[name] for name in ("step", "correct_rate", "step_time_s", "batch_size"))
    metrics = METRICS | sizes | {"mean_reward": -small if "graded" in kinds else rate, "loss": -small}
    metrics |= {"useful_groups": prompts, "num_datums": 65_536, "loss_is_placeholder": "placeholder" in kinds}
    metrics |= {"group_size": 64, "sepa_lambda": rate} if "sepa" in kinds else {}
    metrics |= {"kl_mean": small} if "kl" in kinds else {}
    metrics |= {"teacher_kl_mean": small} if "teacher" in kinds else {}
    metrics |= {"rounds": 16, "sampled_tokens": 10**9, "dropped_tokens": 10**8} if "refill" in kinds else {}
    metrics |= {"reward_p10": -small, "reward_p50": rate, "reward_p90": 1.23} if "graded" in kinds else {}
    metrics |= {f"reward_my_rewards.part_{n}_mean": small for n in range(8)} if "parts" in kinds else {}
    line = step_line(metrics)
    assert len(line) <= COLUMNS, line
    assert line.startswith(f"Step {step} ")
    assert f" | correct={100 * rate:.1f}%" in line
    assert f" | loss={-small:.4f}" in line or "placeholder" in kinds
    assert f" | useful={prompts}/{prompts}" in line
    assert f" | time={time_s:.1f}s" in line or f" | time={time_s:.0f}s" in line
    held_out = {"eval_correct_rate": rate, "eval_ci_low": rate, "eval_ci_high": rate, "eval_pass_at_16": rate}
    held_out |= {"eval_examples": 13_190, "eval_samples": 16, "eval_mean_reward": small, "step": step}
    held_out |= {f"eval_{name}": value for name, value in metrics.items() if name.startswith("reward_")}
    assert max(len(evaluation(held_out)), len(held_out_line(Run(Path("none")), held_out))) <= COLUMNS
    assert max(len(step_line(METRICS | {"loss": small, "step": step}, 80)), len(evaluation(held_out, 80))) <= 80


@pytest.mark.parametrize("rejected", ["", "the server answered:\n  503\r\n\x1b[31mbusy\x1b[0m"])
def test_a_log_has_one_line_for_a_step_and_one_for_an_evaluation(
    context: PluginContext, plugins: Plugins, capsys: Printed, rejected: str
) -> None:
    parts = {f"{prefix}reward_part_{name}_mean": 0.5 for name in "abcdefgh" for prefix in ("", "eval_")}
    metrics = METRICS | parts | HELD_OUT | {"eval_mean_reward": 0.5} | ({"rejected": rejected} if rejected else {})
    with run_console(plugins):
        RunLines(context).retrain_step_end(metrics)
        logging.getLogger("retrain").warning("of a plugin:\t\x1b[2J\x07gone")
    step, evaluated, warning = capsys.readouterr().out.splitlines()
    assert step.startswith("Step 3 ")
    assert evaluated.startswith("Eval after step 3 ")
    for line in (step, evaluated):
        assert all(f"part_{name}=0.500" in line for name in "abcdefgh")
    assert warning.startswith("of a plugin: ")
    assert (step + evaluated + warning).isprintable()


def test_a_terminal_without_a_cursor_gets_plain_lines(plugins: Plugins, monkeypatch: Patch, capsys: Printed) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for term in ("dumb", "DUMB", "unknown"):
        monkeypatch.setenv("TERM", term)
        with run_console(plugins):
            logging.getLogger("retrain").info("Step 1")
        assert capsys.readouterr().out == "Step 1\n"
    metrics = METRICS | {f"reward_my_rewards.part_{n}_mean": 0.125 for n in range(5)}
    first, *rest = with_parts(step_line(metrics), metrics)
    assert (first, " ".join(rest).split()) == (step_line(metrics), [f"my_rewards.part_{n}=0.125" for n in range(5)])
    short = METRICS | {"condition": "grpo+none", "sepa_lambda": None, "reward_a_mean": 0.5}
    assert (with_parts(step_line(short), short), "a=0.500" in step_line(short)) == ([step_line(short)], True)


def test_the_lines_of_an_evaluation_and_of_the_end(tmp_path: Path) -> None:
    head = "correct=47.3% [41.2, 53.4]"
    metrics = HELD_OUT | {"eval_pass_at_16": 0.813}
    expected = f"{head} | pass@16=81.3% | 64 held-out examples x 16"
    assert evaluation(metrics | {"step": -1}) == f"Eval before training | {expected}"
    assert evaluation(metrics | {"step": 9}) == f"Eval after step 9 | {expected}"
    metrics = HELD_OUT | {"step": 9, "eval_samples": 1, "eval_mean_reward": 0.473, "eval_pass_at_1": 0.25}
    del metrics["eval_pass_at_4"]
    plain = {"eval_reward_p10": 0.0, "eval_reward_p50": 0.0, "eval_reward_p90": 1.0}
    assert "reward=" not in evaluation(metrics | plain)
    line = evaluation(metrics | {f"eval_{name}": value for name, value in GRADED.items() if "unique" not in name})
    assert line == f"Eval after step 9 | {head} | reward=0.473 | pass@1=25.0% | 64 x 1", "long parts"
    line = evaluation(metrics | {"eval_reward_my.\x1b[31mown_mean": 0.125})  # leaves no room for the size
    assert line.endswith("% [41.2, 53.4] | reward=0.473 | my.\ufffd[31mown=0.125 | pass@1=25.0%")
    assert training_complete("a+b", 3, 0.5) == "Training complete. a+b, 3 steps, running correct rate: 50.0%"
    last = METRICS | {"step": 69} | EVALUATED
    now = "Held-out: 47.3% [41.2, 53.4] after 70 steps"
    assert held_out_line(Run(tmp_path), last) == now
    for damage in ("{", '{"eval_correct_rate": 1}\n', "[1]\n", '{"step": "x", "eval_correct_rate": 0.1}\n'):
        (tmp_path / "metrics.jsonl").write_text(damage)
        assert held_out_line(Run(tmp_path), last) == now
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 9} | EVALUATED) + "\n")
    assert held_out_line(Run(tmp_path), last).startswith("Held-out: 47.3% [41.2, 53.4] after 10 steps -> ")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": -1} | EVALUATED) + "\n")
    assert (
        held_out_line(Run(tmp_path), last) == f"Held-out: 47.3% [41.2, 53.4] before -> {now.removeprefix('Held-out: ')}"
    )


@pytest.mark.parametrize(
    "case",
    [
        (("adapter_model.safetensors",), "Adapter", True, ["chat", "eval", "export"]),
        (("adapter_model.safetensors",), "Adapter", False, ["chat", "export", "report"]),
        (("config.json", "model.safetensors"), "Model", True, ["chat", "eval", "export"]),
        (("own_state.safetensors",), "", True, ["chat", "eval", "report"]),
        (("prime_rl_backend_state.json",), "State of the run, without weights,", True, ["report", "credit", "status"]),
    ],
)
def test_the_last_lines_name_files_and_commands(
    context: PluginContext, caplog: pytest.LogCaptureFixture, tmp_path: Path, case: tuple[Any, ...]
) -> None:
    files, saved, is_evaluated, verbs = case
    for name in files:
        (tmp_path / name).touch()
    shown = next_commands(Path("logs/my run"), context.plugins, tmp_path, is_evaluated=is_evaluated)
    assert [line.split()[:2] for line in shown] == [[program(), verb] for verb in verbs]
    assert all("'logs/my run'" in line for line in shown)
    fewer: Any = SimpleNamespace(find=lambda kind, name: [name] if name in ("report", "status") else [])
    offered = next_commands(Path("logs/a"), fewer, tmp_path, is_evaluated=is_evaluated)
    assert {line.split()[1] for line in offered} <= {"report", "status"}, "only what something provides"
    caplog.set_level(logging.INFO, logger="retrain")
    lines = RunLines(context)
    lines.retrain_save_state(tmp_path)
    lines.retrain_run_end(run_of(tmp_path), None)
    assert not saved or caplog.messages[1] == f"{saved} saved to {tmp_path}"
    assert not any("Held-out" in line for line in caplog.messages)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_rows_of_the_panel_say_how_far_the_run_is_and_never_move(context: PluginContext, width: int) -> None:
    display = LiveDisplay(Console(width=width, file=io.StringIO()))
    AboveThePanel(display).emit(logging.makeLogRecord({"msg": "Loading [b]x[/b] on cpu..."}))
    assert re.search(r"^  starting +\S+ .*\n  Loading \[b\]x\[/b\] on cpu...\n$", panel(display, width))
    display.retrain_watch_run(context)
    display.retrain_run_start(run_of())
    before = panel(display, width).splitlines()
    display.phase(0, "sampling")
    context.sampling_progress.begin("completions", 4, limit=8)
    assert "completions" not in "".join(before)
    display.phase(3, "training")
    assert "completions" not in panel(display, width), "progress of the phase before"
    context.training_progress.begin("packs", 400)
    context.training_progress.add(300, tokens=123_456_789)
    context.training_progress.started -= 30.0
    batch: Any = SimpleNamespace(batch=SimpleNamespace(rows=[0] * 65_536, num_actions=123_456_789))
    display.retrain_groups_scored(batch)
    for _ in range(200):
        display.retrain_step_end(METRICS | {"eval_correct_rate": 1.0})
    after = panel(display, width).splitlines()
    assert len(before) == len(after) == 6
    for lines in (before, after):
        assert max(map(len, lines)) <= width
        assert [lines[row].split()[0] for row in (0, -2, -1)] == ["a+b", "correct", "held-out"]
    assert after[1].index("━") == after[2].index("━"), "one below the other"
    if width == 120:
        left = duration(300 * METRICS["step_time_s"])
        assert re.search(rf"step 4/500 +━+ +40% time left: {left}$", after[1])
        assert re.search(r"^  training +━+\S* +75% time left: \d+ s$", after[2])
        assert re.search(r"^ +300/400 packs, 123,456,789 tokens, .* tokens/s  65536 rows", after[3])
        graded = {"eval_correct_rate": 0.5, "eval_mean_reward": 0.75, "eval_reward_p50": 0.7}
        display.retrain_step_end(
            METRICS | GRADED | graded | {"rounds": 2, "sampled_tokens": 640, "dropped_tokens": 160}
        )
        shown = panel(display).splitlines()
        assert shown[5].endswith("→ 50.0%  reward=0.750 (p50 0.7)")
        assert shown[6].startswith("  reward=0.250 (p10 0.1, p50 0.25, p90 1)  math=0.500 my.")
        assert shown[7] == "  rounds 2, 25% of 640 tokens dropped"


@pytest.mark.parametrize(("level", "is_shown"), [(PROGRESS_LEVEL, True), (logging.INFO, False), (OUTCOME_LEVEL, False)])
def test_a_silent_run_says_what_it_is_doing(
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
    caplog.clear()
    lines = ProgressLines(context, silence_s=1000.0)
    lines.last_line -= 2000.0  # silent, but only until the next phase begins
    lines.start()
    lines.enter(0, "training")
    lines.end()
    assert caplog.messages == []


Shown = list[tuple[str, dict[str, str]]]


@pytest.fixture
def shown(monkeypatch: Patch) -> Shown:
    """What a kernel's display was told: `display` once, then `update`; tests/docs has a real kernel."""
    calls: Shown = []

    class Handle:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda bundle, *, raw: calls.append((name, bundle))

    ipython: Any = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    display: Any = ModuleType("IPython.display")
    display.DisplayHandle = Handle
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return calls


def test_a_notebook_has_one_display(shown: Shown, plugins: Plugins, monkeypatch: Patch, capsys: Printed) -> None:
    log = logging.getLogger("retrain")
    monkeypatch.setenv("MY_SERVICE_KEY", "sk-planted-0123456789")
    monkeypatch.setattr(panel_module, "PAUSE_S", 60.0)
    with run_console(plugins):
        log.warning("Health: <b>sk-planted-0123456789</b>\x1b[31m")
        for step in range(40):
            log.info("Step %d", step)
        log.debug("group")
        log.log(OUTCOME_LEVEL, "Training complete.")
    assert [call for call, _ in shown] == ["display", "update"], "what the pause held back comes at the end"
    lines = shown[-1][1]["text/plain"].split("\n")
    assert len(lines) == 1 + panel_module.LAST_LINES
    assert lines[0].startswith("Health: <b>(hidden)</b>"), "a warning does not scroll away"
    assert (lines[1][:5], lines[-1]) == ("Step ", "Training complete.")
    assert "&lt;b&gt;(hidden)" in shown[-1][1]["text/html"]
    assert not any("sk-planted" in text or "\x1b" in text for _, bundle in shown for text in bundle.values())
    with run_console(plugins, is_quiet=True):
        log.info("Step 1")
        log.log(OUTCOME_LEVEL, "Done, sk-planted-0123456789")
    assert capsys.readouterr().out == "Done, (hidden)\n"
    assert len(shown) == 2
    for shell in (None, SimpleNamespace()):  # a script and a terminal
        monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda shell=shell: shell)
        assert not is_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not is_notebook()
