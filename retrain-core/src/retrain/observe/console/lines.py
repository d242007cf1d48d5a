"""The watcher that logs a run's lines: steps, evaluations, long phases, and how it ended."""

from __future__ import annotations

import logging
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.kernel.contracts.views import Watcher
from retrain.kernel.errors import ConfigError
from retrain.kernel.hooks import hookimpl
from retrain.kernel.types import Kind
from retrain.observe.console.step_lines import (
    COLUMNS,
    evaluations,
    rate_text,
    step_line,
    supervised_line,
    training_complete,
    with_parts,
)
from retrain.records.record_names import METRICS
from retrain.records.run import Run
from retrain.text.progress import phase_text, progress_of
from retrain.text.terminal_text import OUTCOME_LEVEL, PROGRESS_LEVEL, program

if TYPE_CHECKING:
    from retrain.kernel.contracts.context import PluginContext
    from retrain.kernel.contracts.views import RunView
    from retrain.kernel.registry import Plugins

LOG = logging.getLogger("retrain")
MOST_NEXT = 3
# What to do with a finished run, the likeliest first; commands that are not installed are left out.
NEXT = {
    "chat": "chat {run}",
    "eval": "eval {run}",
    "export": "export {run} --format transformers --out {merged}",
    "report": "report {run}",
    "credit": "credit {run}",
    "status": "status {run}",
}
# Files of a checkpoint, one of which a command needs; a trainer elsewhere keeps the weights to itself.
NEEDED = {
    "chat": ("*.safetensors",),
    "eval": ("*.safetensors",),
    "export": ("adapter_model.safetensors", "config.json"),
}


class RunLines(Watcher):
    """Logs a line per step and per evaluation, and how the run ended."""

    def __init__(self, context: PluginContext) -> None:
        self._progress = ProgressLines(context)
        self._plugins = context.plugins
        self._running_rate: float | None = None
        self._last_adapter: Path | None = None
        self._last_eval: Mapping[str, Any] | None = None

    @hookimpl
    def retrain_run_start(self) -> None:
        """Watch for long phases."""
        self._progress.start()

    def phase(self, step: int, phase: str) -> None:
        """Another phase begins."""
        self._progress.enter(step, phase)

    @hookimpl
    def retrain_step_end(self, metrics: Mapping[str, Any]) -> None:
        """The step's line, and that of its evaluation."""
        width, is_log = columns(), not sys.stdout.isatty()  # tools read a log line by line
        lines = evaluations(metrics, width, is_one_line=is_log)
        if metrics["step"] >= 0:
            lines = with_parts(step_line(metrics, width), metrics, width, is_one_line=is_log) + lines
        elif "sft_loss" in metrics:
            lines = [supervised_line(metrics), *lines]
        for line in lines:
            LOG.info("%s", line)
        if "eval_correct_rate" in metrics:
            self._last_eval = metrics
        self._progress.last_line = time.monotonic()
        self._running_rate = metrics.get("running_correct_rate", self._running_rate)

    @hookimpl
    def retrain_save_state(self, folder: Path | None) -> None:
        """Remember the last checkpoint; `retrain_run_end` shows it."""
        self._last_adapter = folder or self._last_adapter

    @hookimpl
    def retrain_run_end(self, run: RunView, error: BaseException | None) -> None:
        """The last lines of a run that reached its last step; the advice at their end is not for `--quiet`."""
        self._progress.end()
        if error is not None:
            return
        complete = training_complete(run.condition, run.config.training.max_steps, self._running_rate)
        LOG.log(OUTCOME_LEVEL, "%s", complete)
        if self._last_adapter is not None:
            LOG.log(OUTCOME_LEVEL, "%s saved to %s", _saved_in(self._last_adapter), self._last_adapter)
        LOG.log(OUTCOME_LEVEL, "Metrics saved to %s", run.folder / METRICS)
        devices = run.manifest.get("devices", {})
        if devices.get("why"):
            LOG.log(OUTCOME_LEVEL, "Trained on %s: %s", devices["used"], devices["why"])
        if self._last_eval:
            LOG.info("%s", held_out_line(Run(run.folder), self._last_eval))
        is_evaluated = self._last_eval is not None
        if commands := next_commands(run.folder, self._plugins, self._last_adapter, is_evaluated=is_evaluated):
            LOG.info("Next:")
        for command in commands:
            LOG.info("  %s", command)


def _saved_in(folder: Path) -> str:
    """What a checkpoint holds beside the state of its run; a trainer elsewhere may keep the weights to itself."""
    if (folder / "adapter_model.safetensors").is_file():
        return "Adapter"
    return "Model" if any(folder.glob("*.safetensors")) else "State of the run, without weights,"


def columns() -> int:
    """What a line may fill: the terminal if it is narrow, and a log as wide as any."""
    return min(COLUMNS, shutil.get_terminal_size().columns) if sys.stdout.isatty() else COLUMNS


def held_out_line(run: Run, last: Mapping[str, Any]) -> str:
    """`Held-out: 47.3% [41.2, 53.4] before -> 94.9% [91.5, 97.0] after 70 steps`: correct rates with 95 % intervals.

    What it was before training stands in the records, since another session of the run may have measured it.
    """
    now = f"{rate_text(last)} after {_steps(last)}"
    try:
        first = next((line for _, line in run.steps() if "eval_correct_rate" in line), last)
        if first["step"] < last["step"]:
            when = "before" if first["step"] < 0 else f"after {_steps(first)}"
            now = f"{rate_text(first)} {when} -> {now}"
    except (ConfigError, KeyError, TypeError):  # lines of another program; the run itself ends well
        pass
    return f"Held-out: {now}"


def _steps(metrics: Mapping[str, Any]) -> str:
    done = metrics["step"] + 1
    return f"{done} step{'s' * (done != 1)}"


def next_commands(run: Path, plugins: Plugins, checkpoint: Path | None, *, is_evaluated: bool) -> list[str]:
    """The likeliest commands for a finished run that work as typed here; `checkpoint` is its last one."""
    known = [name for name in NEXT if plugins.find(Kind.COMMAND, name)]
    usable = [
        name
        for name in known
        if (name != "eval" or is_evaluated)
        and (name not in NEEDED or (checkpoint and any(any(checkpoint.glob(each)) for each in NEEDED[name])))
    ]
    shown = {"run": shlex.quote(str(run)), "merged": shlex.quote(str(run / "merged"))}
    return [f"{program()} {NEXT[name].format(**shown)}" for name in usable[:MOST_NEXT]]


SILENCE_S = 30.0


class ProgressLines:
    """A daemon thread that logs how far the phase has come when the run has been silent for `silence_s`."""

    def __init__(self, context: PluginContext, silence_s: float = SILENCE_S) -> None:
        self._context = context
        self._silence_s = silence_s
        self._current = (-1, "", time.monotonic())  # step, phase, since when
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="retrain-progress", daemon=True)
        self.last_line = time.monotonic()  # when the run was last heard of

    def start(self) -> None:
        """Start, if lines of this level are shown: neither the live panel nor `--quiet` does."""
        self.last_line = time.monotonic()
        if LOG.isEnabledFor(PROGRESS_LEVEL):
            self._thread.start()

    def enter(self, step: int, phase: str) -> None:
        """Another phase begins."""
        self._current = step, phase, time.monotonic()

    def end(self) -> None:
        """No line from here on."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(max(0.0, self.last_line + self._silence_s - time.monotonic())):
            if time.monotonic() - self.last_line >= self._silence_s:
                self.last_line = time.monotonic()
                step, phase, since = self._current
                progress = progress_of(self._context, phase, since)
                LOG.log(PROGRESS_LEVEL, "  %s", phase_text(phase, step, time.monotonic() - since, progress))
