"""The output of a campaign: plain lines, and on a terminal the active runs below them."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from retrain.campaign.load import Campaign
from retrain.campaign.planned import PlannedRun, progress
from retrain.observe.console.console import logged_to
from retrain.text.amounts import percent
from retrain.text.terminal_text import OUTCOME_LEVEL, harmless_lines, is_redrawable

LOOK_EVERY_S = 1.0


class Lines:
    """Prints events, one line each."""

    def __init__(self, total: int, *, parallel: bool, is_quiet: bool = False) -> None:
        self._total, self._parallel = total, parallel
        self._level = OUTCOME_LEVEL if is_quiet else logging.INFO
        self._panel: _Panel | None = None

    def of(self, total: int) -> Lines:
        """The same output for another number of runs."""
        return Lines(total, parallel=self._parallel, is_quiet=self._level > logging.INFO)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Within the block, log records of plugins are printed too, and a terminal shows the active runs."""
        if self._level <= logging.INFO and is_redrawable(sys.stdout):
            self._panel = _Panel(self._total)
        try:
            with logged_to(_LinesHandler(self), logging.INFO), self._panel.live if self._panel else nullcontext():
                yield
        finally:
            self._panel = None

    def say(self, text: str, level: int = logging.INFO) -> None:
        """Print a line; with --quiet only from the level of outcomes on."""
        if level < self._level:
            return
        if self._panel:
            self._panel.live.console.print(Text(harmless_lines(text)), highlight=False)
        else:
            click.echo(harmless_lines(text))

    def head(self, campaign: Campaign, output: str) -> None:
        mode = "parallel" if self._parallel else "sequential"
        shape = f"{len(campaign.conditions)} conditions x {len(campaign.table.seeds)} seeds"
        self.say(f"Campaign: {shape} = {self._total} runs ({mode})")
        self.say(f"  conditions: {', '.join(campaign.labels)}")
        self.say(f"  seeds: {', '.join(map(str, campaign.table.seeds))}")
        if (plan := campaign.table.plan) and plan.looks:
            after = ", ".join(map(str, plan.looks))
            self.say(f"  looks: after {after} seeds ({plan.spend}); it stops by itself when every verdict is in")
        if tune := campaign.table.tune:
            budget = f"{tune.runs:,} runs" if tune.runs else f"{tune.tokens:,} tokens"
            self.say(f"  tuning: {', '.join(each.path for each in campaign.ranges)}, {budget} of each condition before")
        self.say(f"  max_steps: {campaign.max_steps}")
        self.say(f"  output: {output}")
        if self._parallel:
            self.say(f"  workers: {campaign.workers}")

    def started(self, run: PlannedRun, pid: int | None, note: str) -> None:
        """Print that a run starts, continues, or was found alive."""
        process = f" started (pid={pid})" if self._parallel and pid else " started" if self._parallel else ""
        self.say(f"[{run.number}/{self._total}] {run.name}{process}{f' ({note})' if note else ''}")

    def ended(self, run: PlannedRun, seconds: float, failure: str = "", *, note: str = "") -> None:
        note = f"; {note}" if note else ""
        if self._parallel:
            outcome = f"{run.name} {f'FAILED ({failure})' if failure else 'ok'}{note} ({seconds:.1f}s)"
        else:
            outcome = (f"FAILED: {failure}" if failure else "OK") + note
            if failure and self._level > logging.INFO:
                # The line that names the run was not printed.
                outcome = f"{run.name} {outcome}"
        self.say(f"  {outcome}", logging.WARNING if failure else logging.INFO)

    def show(self, running: Mapping[str, PlannedRun], num_done: int) -> None:
        if self._panel:
            self._panel.update(running, num_done)


class _LinesHandler(logging.Handler):
    def __init__(self, lines: Lines) -> None:
        super().__init__(logging.INFO)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.say(self.format(record), record.levelno)


class _Panel:
    """The active runs; their metrics are read once a second."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._num_done = 0
        self._running: Mapping[str, PlannedRun] = {}
        self._rows: RenderableType = Text("")
        self._looked = 0.0
        self.live = Live(get_renderable=self.render, refresh_per_second=4, transient=True, console=Console())

    def update(self, running: Mapping[str, PlannedRun], num_done: int) -> None:
        self._running, self._num_done = dict(running), num_done
        if time.monotonic() - self._looked >= LOOK_EVERY_S:
            self._looked = time.monotonic()
            self._rows = self._table()

    def render(self) -> RenderableType:
        head = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self._total, completed=self._num_done, width=30)
        head.add_row(Text(f"{self._num_done}/{self._total} runs done", style="bold"), bar)
        return Group(head, self._rows)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, run in self._running.items():
            latest = progress(run.folder)
            rate = "" if latest.correct_rate is None else f"correct {percent(latest.correct_rate)}"
            bar = ProgressBar(total=run.max_steps, completed=latest.steps_done, width=20)
            table.add_row(Text(f"  {name}", style="magenta"), bar, f"step {latest.steps_done}/{run.max_steps}", rate)
        return table
