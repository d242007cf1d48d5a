"""Displays that are redrawn during a run: the live panel of a terminal, and the lines of a notebook."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.views import GroupsView, RunView, Watcher
from retrain.kernel.hooks import hookimpl
from retrain.observe.console.step_lines import dropped_text, graded_texts, shadow_text
from retrain.text.amounts import ABSENT, duration, percent
from retrain.text.progress import progress_of, progress_text, share_of, warm_up_left
from retrain.text.terminal_text import printable, sparkline

# The time left is estimated from their median, so that one slow step does not change it.
RECENT_STEPS = 20
LABEL_COLUMNS, SHARE_COLUMNS, TIME_COLUMNS = 13, 4, 24
MOST_BAR_COLUMNS = 40


class LiveDisplay(Watcher):
    """An ordinary plugin that follows the run through life-cycle hooks and redraws four times a second.

    Its rows never move: condition, run, phase, progress of the phase, correct rate, held-out rate; below them the rows
    that only some runs have. Bars and times are aligned. Rows are cut, never wrapped.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._run: RunView | None = None
        self._context: PluginContext | None = None
        self._phase, self._phase_started = "starting", time.monotonic()
        self._batch = self._said = ""
        self._step = self._done = 0
        self._rates: list[float] = []
        self._shadow_rates: list[float] = []
        self._evals: list[float] = []
        self._reward = self._held_out_reward = self._teacher = self._rounds = ""
        self._times_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._spinner = Spinner("dots")
        self._live = Live(console=self.console, get_renderable=self.picture, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def heard(self, line: str) -> None:
        """A line was printed: until the run starts, the last one names the phase that takes so long."""
        self._said, self._phase_started = ("", self._phase_started) if self._run else (line, time.monotonic())

    @hookimpl
    def retrain_watch_run(self, context: PluginContext) -> LiveDisplay:
        self._context = context  # its parts report their progress there
        return self

    @hookimpl
    def retrain_run_start(self, run: RunView) -> None:
        self._run = run

    def phase(self, step: int, phase: str) -> None:
        self._phase, self._phase_started = phase, time.monotonic()
        self._step = step if phase in ("sampling", "training") else self._step

    @hookimpl
    def retrain_groups_scored(self, groups: GroupsView) -> None:
        if groups.batch is not None:
            self._batch = f"{len(groups.batch.rows)} rows, {groups.batch.num_actions:,} action tokens"

    @hookimpl
    def retrain_step_end(self, metrics: Mapping[str, Any]) -> None:
        if "teacher_kl_mean" in metrics:
            self._teacher = f"teacher KL {metrics['teacher_kl_mean']:.4f}"
        if "correct_rate" in metrics:
            self._rates.append(metrics["correct_rate"])
        if "shadow_correct_rate" in metrics:
            self._shadow_rates.append(metrics["shadow_correct_rate"])
        if "num_datums" in metrics:
            self._done += 1
            self._times_s.append(metrics["step_time_s"])
            self._reward = "  ".join(graded_texts(metrics))
            self._rounds = f"rounds {metrics['rounds']}, {dropped_text(metrics)}" if "rounds" in metrics else ""
        if "eval_correct_rate" in metrics:
            self._evals.append(metrics["eval_correct_rate"])
            shown = (shadow_text(metrics, "eval_shadow_rate"), *graded_texts(metrics, "eval_"))
            self._held_out_reward = "  ".join(filter(None, shown))

    def picture(self) -> RenderableType:
        data = progress_of(self._context, self._phase, self._phase_started) if self._context else {}
        elapsed_s = time.monotonic() - self._phase_started
        left_s = data.get("time_left_s")
        passing = f"for {duration(elapsed_s)}" if left_s is None else f"time left: {duration(left_s)}"
        phase = "  " + printable(self._phase)
        if self._run is None:
            return Group(self._bar_row(phase, share_of(data), passing), _row(self._said, style="dim"))
        total, config = self._run.config.training.max_steps, self._run.config
        step = f"step {min(self._step + 1, total)}/{total}" if self._step >= 0 else f"SFT, {warm_up_left(self._step)}"
        batch = self._batch if self._phase == "training" else ""
        done = "  ".join(filter(None, (progress_text(data, has_time=False), batch)))
        held_out = " → ".join(map(percent, self._evals[-6:])) or ABSENT
        rows: list[RenderableType] = [
            _row(f"{self._run.condition} on {config.model.model}", style="bold magenta"),
            self._bar_row(step, self._done / max(total, 1), self._time_left(total - self._done), is_run=True),
            self._bar_row(phase, share_of(data), passing),
            _row(done, style="dim", indent=LABEL_COLUMNS + 1),
            self._rate_row("correct", self._rates, "green"),
            _row(f"held-out {held_out}  {self._held_out_reward}"),
        ]
        rows += [self._rate_row("shadow", self._shadow_rates, "yellow")] if self._shadow_rates else []
        return Group(*rows, *(_row(shown) for shown in (self._reward, self._rounds, self._teacher) if shown))

    def _bar_row(self, label: str, share: float | None, time_text: str, *, is_run: bool = False) -> Table:
        """Label, bar, percent and time in columns of fixed width; a bar of unknown length pulses."""
        free = self.console.width - LABEL_COLUMNS - SHARE_COLUMNS - TIME_COLUMNS - 3
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_column(width=LABEL_COLUMNS, no_wrap=True, overflow="ellipsis")
        grid.add_column(width=max(4, min(MOST_BAR_COLUMNS, free)))
        grid.add_column(width=SHARE_COLUMNS, justify="right", no_wrap=True)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        head = Table.grid(padding=(0, 1, 0, 0))
        head.add_row(self._spinner, Text(label, style="bold", no_wrap=True, overflow="ellipsis"))
        bar = ProgressBar(total=None if share is None else 1.0, completed=share or 0.0, pulse=share is None)
        done = "" if share is None else percent(share, 0)
        grid.add_row(head if is_run else Text(label, style="bold green"), bar, done, Text(time_text, style="cyan"))
        return grid

    def _rate_row(self, label: str, rates: Sequence[float], style: str) -> Text:
        rate = percent(rates[-1] if rates else None)
        width = max(1, min(60, self.console.width - 20))
        return _row(f"{label:<8} {rate}").append(f"  {sparkline(rates, width)}", style=style)

    def _time_left(self, steps: int) -> str:
        if not self._times_s:
            return "time left: measuring"
        seconds = sorted(self._times_s)[len(self._times_s) // 2] * steps
        return f"time left: {duration(seconds)}"


def _row(text: str, *, style: str = "", indent: int = 2) -> Text:
    return Text(" " * indent + text.rstrip(), style=style, no_wrap=True, overflow="ellipsis")


class AboveThePanel(logging.Handler):
    """Prints log records above the panel, verbatim: markup in the text is ignored."""

    def __init__(self, display: LiveDisplay) -> None:
        super().__init__()
        self.display = display

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        self.display.heard(line)
        self.display.console.print(Text(line), highlight=False)


LAST_LINES, LAST_WARNINGS = 15, 10
# Each update replaces the whole output in the browser, so lines in quick succession share one.
PAUSE_S = 0.2
# `Markup.format` escapes its argument, since it may be a model's text.
SHOWN = Markup('<pre style="white-space: pre-wrap; line-height: 1.3; margin: 0">{}</pre>')


class NotebookLines(logging.Handler):
    """Shows the last lines below the last warnings; `close` shows the lines held back by the pause between updates."""

    def __init__(self) -> None:
        super().__init__()
        from IPython.display import DisplayHandle  # there is one in a notebook

        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._warnings: deque[str] = deque(maxlen=LAST_WARNINGS)
        self._display = DisplayHandle()
        self._shown_at = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        lines = self._warnings if record.levelno == logging.WARNING else self._lines
        lines.extend(self.format(record).split("\n"))
        if time.monotonic() - self._shown_at > PAUSE_S:
            self._show()

    def close(self) -> None:
        if self._lines or self._warnings:
            self._show()
        super().close()

    def _show(self) -> None:
        text = "\n".join([*self._warnings, *self._lines])
        bundle = {"text/plain": text, "text/html": SHOWN.format(text)}
        (self._display.update if self._shown_at else self._display.display)(bundle, raw=True)
        self._shown_at = time.monotonic()
