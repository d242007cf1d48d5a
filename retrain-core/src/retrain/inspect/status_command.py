"""`retrain status [DIR | RUN]`: the state of every run below a folder; of one run its resume and its forecast."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from retrain.kernel.errors import EXIT_DONE, EXIT_FAILED
from retrain.kernel.registry import Plugins
from retrain.records.reading import number
from retrain.records.runs.campaign_status import CampaignRun, Overview, progress_text, scan
from retrain.records.runs.run_status import RunStatus
from retrain.text.amounts import ABSENT, decimal, duration, percent
from retrain.text.command_options import json_option
from retrain.text.progress import phase_text, share_of
from retrain.text.tables import rich_table, table_console
from retrain.text.terminal_text import is_redrawable, printable
from retrain.verdicts.ledger.looks import InterimLooks

Look = Callable[[], Overview]
FOLDER = Path("logs")
INTERVAL_S = 5.0
# 80 % in place of 95 %: intervals from a few finished runs would cover almost every rate.
LEVEL = 0.8
EPILOG = """\b
Examples:
  retrain status                  all below ./logs
  retrain status runs --active    live runs below ./runs
  retrain status --follow --active --interval 1
  retrain status --follow --json  a line every five seconds
  retrain status logs/train --resume
  retrain status logs/train --resume --config longer.toml --json
  retrain status logs/campaign_20260301_120000/runs/maxrl+none_s7 --forecast --among logs

\b
Exit codes: 0 done; 1 there is no such folder, or the run of --resume cannot continue; 2 usage or configuration error,
            or there are too few finished runs for --forecast, or forecasts are withdrawn.
"""


@click.command("status", epilog=EPILOG)
@click.argument("root", metavar="[DIR | RUN]", required=False, type=click.Path(path_type=Path))
@json_option("As JSON; with --follow one line each time.")
@click.option("--all", "everything", is_flag=True, help="Also runs that ended and have been idle for 24 hours.")
@click.option("--active", "only_active", is_flag=True, help="Only active runs.")
@click.option("--follow", "--watch", is_flag=True, help="Refresh every --interval seconds until Ctrl-C.")
@click.option(
    "--interval", "interval_s", default=INTERVAL_S, show_default=True, type=click.FloatRange(min=0.05), help="Seconds."
)
@click.option("--resume", is_flag=True, help="List what `retrain --resume RUN` would restore.")
@click.option(
    "--config",
    "config_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="With --resume: configuration to continue with.",
)
@click.option("--forecast", is_flag=True, help="Of RUN: its last held-out rate, forecast from finished runs.")
@click.option(
    "--among",
    type=click.Path(path_type=Path),
    help="With --forecast: folder with finished runs (default: the one that holds RUN).",
)
@click.option(
    "--level", type=click.FloatRange(0.5, 0.99), help="With --forecast: level of the interval (default: 0.8)."
)
@click.pass_context
def command(
    ctx: click.Context,
    root: Path | None,
    as_json: bool,
    everything: bool,
    only_active: bool,
    follow: bool,
    interval_s: float,
    resume: bool,
    config_file: Path | None,
    forecast: bool,
    among: Path | None,
    level: float | None,
) -> None:
    """Show the runs and campaigns below DIR (default: logs); exit code 1 when there is no such folder.

    With --resume list the parts that a resume of RUN would restore, without loading a model; exit code 1 if it could
    not continue. With --forecast forecast the last held-out rate of RUN.
    """
    if resume or forecast:
        if (resume and forecast) or everything or only_active or follow:
            raise click.UsageError("--resume and --forecast exclude each other, --all, --active and --follow")
        if root is None:
            raise click.UsageError("--resume and --forecast need a RUN")
    if config_file and not resume:
        raise click.UsageError("--config goes with --resume")
    if not forecast and (among or level is not None):
        raise click.UsageError("--among and --level go with --forecast")
    if resume and root:
        ctx.exit(_print_resume(root.expanduser(), config_file, ctx.obj, as_json=as_json))
    if forecast and root:
        from retrain.verdicts.forecast import print_forecast  # imports numpy, that `status` does not need

        print_forecast(root, among, level or LEVEL, as_json=as_json)
        return
    folder, interim = root or FOLDER, InterimLooks("status")

    def look() -> Overview:
        overview = scan(folder).select(everything=everything, only_active=only_active)
        for campaign in overview.campaigns:
            interim.of(campaign)
        # A single run may belong to a campaign above it, whose looks are counted.
        if not overview.campaigns:
            interim.at([folder])
        return overview

    if follow:
        _follow(look, interval_s, as_json=as_json)
    elif as_json:
        click.echo(json.dumps(look().as_data(), indent=2, allow_nan=False))
    else:
        _print(look())


def _print_resume(run: Path, config_file: Path | None, plugins: Plugins, *, as_json: bool) -> int:
    from retrain.inspect.resume_check import check_lines, check_resume  # imports the training loop

    check = check_resume(run, config_file, plugins)
    if as_json:
        click.echo(json.dumps(check.as_data(), indent=2, allow_nan=False))
    else:
        click.echo("\n".join(map(printable, check_lines(check))))
    return EXIT_DONE if check.can_resume else EXIT_FAILED


def _print(overview: Overview) -> None:
    console = table_console()
    console.print(picture(overview, console.width))


def _follow(look: Look, interval_s: float, *, as_json: bool) -> None:
    try:
        if is_redrawable(sys.stdout) and not as_json:
            from rich.live import Live

            # A missing folder must be reported before the screen is cleared.
            first = look()
            console = Console(highlight=False)
            with Live(picture(first, console.width), console=console, screen=True, auto_refresh=False) as live:
                while True:
                    time.sleep(interval_s)
                    live.update(picture(look(), console.width), refresh=True)
        while True:
            if as_json:
                click.echo(json.dumps(look().as_data(), allow_nan=False))
            else:
                _print(look())
            time.sleep(interval_s)
    except KeyboardInterrupt:
        return


# The status of runs and campaigns as tables.


COLOURS = {"running": "green", "done": "cyan", "stale": "yellow", "partial": "yellow", "stopped": "yellow"}
ENDED_BADLY = "red"
# Below this width, as in a terminal next to an editor, a table would wrap.
NARROW = 80
RATES = ("correct", "held-out")


def picture(overview: Overview, columns: int = NARROW) -> RenderableType:
    """Return the banner, each campaign as a matrix of conditions and seeds, then the other runs.

    On a terminal narrower than `NARROW` columns, next to an editor, a run has one row, and a live one a bar for its
    phase instead of a sentence.
    """
    is_narrow = columns < NARROW
    banner = f"Campaigns: {len(overview.campaigns)} | Runs: {len(overview.runs)}"
    parts: list[RenderableType] = [Text(banner, style="bold")]
    for campaign in overview.campaigns:
        head = Text(printable(str(campaign.path)), style="bold").append("  ").append_text(state_text(campaign.state))
        table = rich_table(("condition", *(f"s{seed}" for seed in campaign.seeds)))
        for condition in campaign.conditions:
            cells = []
            for run in (campaign.run_of(condition, seed) for seed in campaign.seeds):
                rate = run.status.held_out_rate if run and run.status else None
                shown = "" if rate is None else f" {percent(rate)}"
                cells.append(_progress(run).append(shown, style="default"))
            table.add_row(Text(printable(condition)), *cells)
        parts += [Text(), head.append(f"  {progress_text(campaign)}", style="default"), table]
        parts += [line for run in campaign.runs if run.status for line in _notes(run.status, campaign.path, is_narrow)]
    if overview.runs:
        parts += [Text(), _table(overview, is_narrow)]
        parts += [
            Text(f"{_name(run, overview.root)}: {printable(_on_one_line(run.error))}", style=ENDED_BADLY)
            for run in overview.runs
            if run.error
        ]
        parts += [line for run in overview.runs for line in _notes(run, overview.root, is_narrow)]
    if overview.num_hidden:
        parts += [Text(), Text(f"{overview.num_hidden} not shown (--all shows every run and campaign)", style="dim")]
    return Group(*parts)


def _notes(run: RunStatus, root: Path, is_narrow: bool) -> list[RenderableType]:
    name = _name(run, root)
    notes: list[RenderableType] = [
        Text(f"{name}: {printable(_on_one_line(change))}", style="yellow") for change in run.accepted
    ]
    if run.shadow_correct_rate is not None:
        both = f"correct {percent(run.correct_rate)} by the reward, {percent(run.shadow_correct_rate)} by its shadow"
        notes.append(Text(f"{name}: {both}"))
    if run.task_rates or run.tasks_out:
        rates = ", ".join(f"{task} {percent(rate)}" for task, rate in run.task_rates.items())
        out = f"; paused or ended: {run.tasks_out}" if run.tasks_out else ""
        notes.append(Text(f"{name}: correct by task: {printable(rates + out)}"))
    if run.health:
        example = f"; for example {run.gaming_example}" if run.gaming_example else ""
        found = f"health at its last step: {', '.join(run.health)}{example}"
        notes.append(Text(f"{name}: {printable(_on_one_line(found))}", style="yellow"))
    if run.eval_rates.keys() - {"held_out"}:
        rates = ", ".join(f"{set_name} {percent(rate)}" for set_name, rate in run.eval_rates.items())
        notes.append(Text(f"{name}: evaluated after its last step: {printable(rates)}"))
    if run.phase:
        shown = phase_text(run.phase, run.phase_step or 0.0, run.phase_elapsed_s or 0.0, run.progress)
        line = Text(f"{name}: {shown}", style=COLOURS["running"])
        notes.insert(0, _phase_bar(name, run) if is_narrow else line)
    return notes


def _phase_bar(name: str, run: RunStatus) -> Table:
    """`tiny: sampling  ━━━━━━━━━   42%  1.2 s left`."""
    share, left_s = share_of(run.progress), number(run.progress.get("time_left_s"))
    left = f"for {duration(run.phase_elapsed_s)}" if left_s is None else f"{duration(left_s)} left"
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=24, no_wrap=True, overflow="ellipsis")
    grid.add_column(width=14)
    grid.add_column(width=4, justify="right", no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    done = "" if share is None else percent(share, 0)
    bar = Text("") if share is None else ProgressBar(total=1.0, completed=share)
    grid.add_row(Text(f"{name}: {printable(run.phase)}", style=COLOURS["running"]), bar, done, Text(left))
    return grid


def _on_one_line(error: str) -> str:
    return "; ".join(filter(None, map(str.strip, error.split("\n"))))


def state_text(state: str) -> Text:
    return Text(printable(state), style=COLOURS.get(state, ENDED_BADLY))


def _table(overview: Overview, is_narrow: bool) -> Table:
    heads = ("step", *RATES, "left") if is_narrow else ("step", *RATES, "reward", "loss", "time")
    table = rich_table(("run", "state", *heads), num_names=2)
    table.columns[1].no_wrap = True
    if not is_narrow:
        table.add_column("condition", overflow="fold")
    for run in overview.runs:
        steps = ABSENT if run.max_steps is None else f"{run.step}/{run.max_steps}"
        rates = percent(run.correct_rate), percent(run.held_out_rate)
        head = (Text(_name(run, overview.root)), state_text(run.state), steps, *rates)
        if is_narrow:
            table.add_row(*head, duration(run.left_s) if run.is_live else "")
            continue
        numbers = decimal(run.mean_reward, 3), decimal(run.loss, 4), duration(run.wall_time_s)
        table.add_row(*head, *numbers, Text(printable(run.condition)))
    return table


def _progress(run: CampaignRun | None) -> Text:
    if run is None or run.status is None:
        return Text("✗", style=ENDED_BADLY) if run and run.has_failed else Text(ABSENT, style="dim")
    status = run.status
    if status.state == "done":
        return Text(f"{status.step} ✓", style=COLOURS["done"])
    if status.is_live:
        total = ABSENT if status.max_steps is None else status.max_steps
        return Text(f"{status.step}/{total}", style=COLOURS[status.state])
    return Text(f"{status.step} ✗", style=ENDED_BADLY)


def _name(run: RunStatus, root: Path) -> str:
    """Return the path below the root; the whole path of the root itself and of paths outside."""
    is_inside = run.path != root and run.path.is_relative_to(root)
    return printable(str(run.path.relative_to(root) if is_inside else run.path))
