"""The console of a run: where its lines go, and the watcher that logs steps, evaluations, long phases and the end."""

from __future__ import annotations

import logging
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import click

from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.views import RunView, Watcher
from retrain.kernel.errors import ConfigError
from retrain.kernel.hooks import hookimpl
from retrain.kernel.registry import Owner, Plugins
from retrain.kernel.types import Kind
from retrain.observe.console import step_lines
from retrain.observe.console.step_lines import COLUMNS, rate_text
from retrain.records.record_names import METRICS
from retrain.records.run import Run
from retrain.text.amounts import counted
from retrain.text.process import drop_stdout
from retrain.text.progress import phase_text, progress_of
from retrain.text.secrets import redacted
from retrain.text.terminal_text import OUTCOME_LEVEL, PROGRESS_LEVEL, harmless_lines, is_redrawable, program

LOG = logging.getLogger("retrain")
MOST_NEXT = 3
# After this long without a line a user wonders whether the run hangs.
SILENCE_S = 30.0
# The likeliest uses of a finished run, in order; commands that are not installed are left out.
NEXT = {
    "chat": "chat {run}",
    "eval": "eval {run}",
    "export": "export {run} --format transformers --out {merged}",
    "report": "report {run}",
    "credit": "credit {run}",
    "status": "status {run}",
}
# Files of a checkpoint, one of which a command needs; a trainer on another machine may keep the weights.
NEEDED = {
    "chat": ("*.safetensors",),
    "eval": ("*.safetensors",),
    "export": ("adapter_model.safetensors", "config.json"),
}


class HarmlessLines(logging.Formatter):
    """Lines without control characters and known secrets, whatever a plugin or a server wrote.

    stdout hides secrets as well, except in a notebook or a program that calls retrain.
    """

    def format(self, record: logging.LogRecord) -> str:
        return harmless_lines(str(redacted(super().format(record))))


class PlainLines(logging.StreamHandler[TextIO]):
    """Writes lines to stdout; the run continues when nothing reads them any more."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Report once that the reader is gone or the disk is full, and write nothing from then on."""
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        drop_stdout()
        gone = isinstance(error, BrokenPipeError)
        reason = "nothing reads the output any more" if gone else f"the output cannot be written: {error.strerror}"
        click.echo(f"retrain: {reason}; the run continues without it", err=True)


@contextmanager
def run_console(plugins: Plugins, *, is_quiet: bool = False) -> Iterator[None]:
    """Route the run's lines to stdout within the block, and show the live panel on a terminal.

    In a notebook the lines share one display. `is_quiet`: only warnings and the last lines.
    """
    if is_notebook() and not is_quiet:
        from retrain.observe.console.panel import NotebookLines  # imports rich, like the next

        with closing(NotebookLines()) as lines, logged_to(lines, logging.INFO):
            yield
    elif is_quiet or not is_redrawable(sys.stdout):
        with logged_to(PlainLines(sys.stdout), OUTCOME_LEVEL if is_quiet else PROGRESS_LEVEL):
            yield
    else:
        from retrain.observe.console.panel import AboveThePanel, LiveDisplay

        display = LiveDisplay()
        plugins.add(display, Owner(distribution="retrain-core", source="retrain.observe.console.panel"))
        with display, logged_to(AboveThePanel(display), logging.INFO):
            yield


@contextmanager
def logged_to(handler: logging.Handler, level: int) -> Iterator[None]:
    """Send the lines of retrain's logger from `level` on to a handler within the block, and to no other."""
    before = LOG.level, LOG.propagate
    handler.setFormatter(HarmlessLines("%(message)s"))
    LOG.setLevel(level)
    # A root handler of the calling program would print each line a second time.
    LOG.propagate = False
    LOG.addHandler(handler)
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(before[0])
        LOG.propagate = before[1]


def is_notebook() -> bool:
    """True if this process is the kernel of a notebook; imports nothing."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None


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
        self._progress.start()

    def phase(self, step: int, phase: str) -> None:
        self._progress.enter(step, phase)

    @hookimpl
    def retrain_step_end(self, metrics: Mapping[str, Any]) -> None:
        # Tools read a log line by line, so a step is never split over two.
        is_log = not sys.stdout.isatty()
        width = COLUMNS if is_log else min(COLUMNS, shutil.get_terminal_size().columns)
        lines = step_lines.evaluations(metrics, width, is_one_line=is_log)
        if metrics["step"] >= 0:
            line = step_lines.step_line(metrics, width)
            lines = step_lines.with_parts(line, metrics, width, is_one_line=is_log) + lines
        elif "sft_loss" in metrics:
            lines = [step_lines.supervised_line(metrics), *lines]
        for line in lines:
            LOG.info("%s", line)
        if "eval_correct_rate" in metrics:
            self._last_eval = metrics
        self._progress.last_line = time.monotonic()
        self._running_rate = metrics.get("running_correct_rate", self._running_rate)

    @hookimpl
    def retrain_save_state(self, folder: Path | None) -> None:
        self._last_adapter = folder or self._last_adapter

    @hookimpl
    def retrain_run_end(self, run: RunView, error: BaseException | None) -> None:
        self._progress.end()
        if error is not None:
            return
        complete = step_lines.training_complete(run.condition, run.config.training.max_steps, self._running_rate)
        LOG.log(OUTCOME_LEVEL, "%s", complete)
        if self._last_adapter is not None:
            files = {file.name for file in self._last_adapter.glob("*.safetensors")}
            # A trainer on another machine may keep the weights.
            what = "Model" if files else "State of the run, without weights,"
            saved = "Adapter" if "adapter_model.safetensors" in files else what
            LOG.log(OUTCOME_LEVEL, "%s saved to %s", saved, self._last_adapter)
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


def held_out_line(run: Run, last: Mapping[str, Any]) -> str:
    """`Held-out: 47.3% [41.2, 53.4] before -> 94.9% [91.5, 97.0] after 70 steps`: correct rates with 95 % intervals.

    The first rate comes from the records, since another session of the run may have measured it.
    """

    def done(metrics: Mapping[str, Any]) -> str:
        return counted(metrics["step"] + 1, "step")

    now = f"{rate_text(last)} after {done(last)}"
    # The records may hold lines of another program; the run itself ends well.
    with suppress(ConfigError, KeyError, TypeError):
        first = next((line for _, line in run.steps() if "eval_correct_rate" in line), last)
        if first["step"] < last["step"]:
            when = "before" if first["step"] < 0 else f"after {done(first)}"
            now = f"{rate_text(first)} {when} -> {now}"
    return f"Held-out: {now}"


def next_commands(run: Path, plugins: Plugins, checkpoint: Path | None, *, is_evaluated: bool) -> list[str]:
    """The likeliest commands for a finished run, ready to be typed; `checkpoint` is its last one."""
    known = [name for name in NEXT if plugins.find(Kind.COMMAND, name)]
    usable = [
        name
        for name in known
        if (name != "eval" or is_evaluated)
        and (name not in NEEDED or (checkpoint and any(any(checkpoint.glob(each)) for each in NEEDED[name])))
    ]
    shown = {"run": shlex.quote(str(run)), "merged": shlex.quote(str(run / "merged"))}
    return [f"{program()} {NEXT[name].format(**shown)}" for name in usable[:MOST_NEXT]]


class ProgressLines:
    """A daemon thread that logs the progress of a phase when the run has been silent for `silence_s`."""

    def __init__(self, context: PluginContext, silence_s: float = SILENCE_S) -> None:
        self._context = context
        self._silence_s = silence_s
        self._current = (-1, "", time.monotonic())  # step, phase, since when
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="retrain-progress", daemon=True)
        self.last_line = time.monotonic()  # when the run was last heard of

    def start(self) -> None:
        """Start, if lines of this level are shown: neither the live panel nor `--quiet` shows them."""
        self.last_line = time.monotonic()
        if LOG.isEnabledFor(PROGRESS_LEVEL):
            self._thread.start()

    def enter(self, step: int, phase: str) -> None:
        self._current = step, phase, time.monotonic()

    def end(self) -> None:
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
