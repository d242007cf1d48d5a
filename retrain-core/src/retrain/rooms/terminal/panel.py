"""The live panel of a run on a terminal: step, phase, correct-rate sparkline, held-out rate, time left."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.views import BatchView, RunView
from retrain.kernel.hooks import hookimpl
from retrain.rooms.terminal.lines import dropped_text, graded_texts
from retrain.rooms.text.phase_progress import progress_of, progress_text, warm_up_left
from retrain.rooms.text.terminal_text import duration, sparkline

PHASES = ("sampling", "scoring", "training", "eval")
RECENT_STEPS = 20  # the time left is estimated from their median


class LiveDisplay:
    """An ordinary plugin that follows the run through life-cycle hooks and redraws four times a second."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._run: RunView | None = None
        self._context: PluginContext | None = None
        self._phase, self._phase_started = "", 0.0
        self._batch = ""
        self._step = self._done = 0
        self._rates: list[float] = []
        self._evals: list[float] = []
        self._reward = self._held_out_reward = self._teacher = ""
        self._times_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._step_started = time.perf_counter()
        self._spinner = Spinner("dots")
        self._live = Live(console=self.console, get_renderable=self.picture, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def handler(self) -> logging.Handler:
        """A log handler that prints above the panel and ignores markup in the text."""
        return _AboveThePanel(self.console)

    @hookimpl
    def retrain_watch_run(self, context: PluginContext) -> None:
        """Remember where the parts report how far they have come."""
        self._context = context

    @hookimpl
    def retrain_run_start(self, run: RunView) -> None:
        """Remember the run."""
        self._run = run

    @hookimpl
    def retrain_step_start(self, step: int) -> None:
        """Start the clock of the step."""
        self._step, self._step_started = step, time.perf_counter()

    @hookimpl
    def retrain_phase(self, phase: str) -> None:
        """Show the phase."""
        self._phase, self._phase_started = phase, time.monotonic()

    @hookimpl
    def retrain_batch_ready(self, batch: BatchView) -> None:
        """Show how many rows and tokens are being trained."""
        self._batch = f"{len(batch.batch.rows)} rows, {batch.batch.num_actions} action tokens"

    @hookimpl
    def retrain_step_end(self, metrics: Mapping[str, Any]) -> None:
        """Add the step's numbers to the panel."""
        if "teacher_kl_mean" in metrics:
            self._teacher = f"teacher KL {metrics['teacher_kl_mean']:.4f}"
        if "correct_rate" in metrics:
            self._rates.append(metrics["correct_rate"])
        if "num_datums" in metrics:
            self._done += 1
            self._times_s.append(metrics["step_time_s"])
            self._reward = "  ".join(graded_texts(metrics))
            self._rounds = f"rounds {metrics['rounds']}, {dropped_text(metrics)}" if "rounds" in metrics else ""
        if "eval_correct_rate" in metrics:
            self._evals.append(metrics["eval_correct_rate"])
            self._held_out_reward = "  ".join(graded_texts(metrics, "eval_"))

    def picture(self) -> RenderableType:
        """The current panel."""
        if self._run is None:
            return self._spinner
        total = self._run.config.training.max_steps
        done = self._done
        head = Table.grid(padding=(0, 1))
        head.add_row(
            self._spinner,
            Text(f"step {min(self._step + 1, total)}/{total}" if self._step >= 0 else self._warm_up(), style="bold"),
            ProgressBar(total=total, completed=done, width=30),
            Text(self._time_left(total - done), style="cyan"),
        )
        phases = Text("  ")
        for phase in PHASES:
            phases.append(f"{phase}  ", style="bold green" if phase == self._phase else "dim")
        phases.append(f"{time.perf_counter() - self._step_started:.1f}s", style="dim")
        if self._phase == "training":
            phases.append(f"  {self._batch}", style="dim")
        rows: list[RenderableType] = [Text(f"  {self._run.condition}", style="bold magenta"), head, phases]
        if self._context and (data := progress_of(self._context, self._phase, self._phase_started)):
            rows.append(Text(f"  {progress_text(data)}"))
        if self._rates:
            rate = Text(f"  correct {100 * self._rates[-1]:5.1f}%  ")
            rows.append(rate.append(sparkline(self._rates), style="green"))
            rows += [Text(f"  {shown}") for shown in (self._reward, self._rounds) if shown]
        rows += [Text(f"  {self._teacher}")] if self._teacher else []
        if self._evals:
            shown = " → ".join(f"{100 * value:.1f}%" for value in self._evals[-6:])
            rows.append(Text(f"  held-out {shown}  {self._held_out_reward}".rstrip()))
        return Group(*rows)

    def _warm_up(self) -> str:
        return f"warm-up, {warm_up_left(self._step)}"

    def _time_left(self, steps: int) -> str:
        if not self._times_s:
            return "time left: measuring"
        seconds = sorted(self._times_s)[len(self._times_s) // 2] * steps
        return f"time left: {duration(seconds)}"


class _AboveThePanel(logging.Handler):
    """Prints records on the panel's console."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line verbatim."""
        self.console.print(Text(self.format(record)), highlight=False)
