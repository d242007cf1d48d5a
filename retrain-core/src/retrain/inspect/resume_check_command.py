"""`retrain resume-check DIR`: whether a run can be continued, from where, and what would be lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from retrain.inspect.resume_check import Item, ResumeCheck, check_resume
from retrain.kernel.errors import EXIT_FAILED
from retrain.kernel.registry import Plugins
from retrain.text.terminal_text import printable

EPILOG = """\b
Examples:
  retrain resume-check logs/train
  retrain resume-check logs/train --config longer.toml --json

\b
Exit codes: 0 the run can continue; 1 it cannot; 2 usage or configuration error.
"""


@click.command("resume-check", epilog=EPILOG)
@click.argument("run", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--config", "config_file", metavar="FILE", type=click.Path(path_type=Path), help="Configuration to continue with."
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_context
def command(ctx: click.Context, run: Path, config_file: Path | None, as_json: bool) -> None:
    """Say what `retrain --resume DIR` would restore and what not, without loading a model; exit code 1 if it would not
    go on."""
    plugins: Plugins = ctx.obj
    check = check_resume(run.expanduser(), config_file, plugins)
    if as_json:
        click.echo(json.dumps(check.as_data(), indent=2, allow_nan=False))
    else:
        click.echo("\n".join(map(printable, _text(check))))
    ctx.exit(0 if check.can_resume else EXIT_FAILED)


def _text(check: ResumeCheck) -> list[str]:
    if check.obstacles:
        head = f"{check.run} cannot be resumed:"
    elif check.is_complete:
        head = f"{check.run} is complete: {check.next_step} steps are done; a larger --max-steps continues it"
    else:
        head = f"{check.run} can be resumed at step {check.next_step}, from {check.checkpoint or 'the beginning'}"
    obstacles = [f"  {line}" for obstacle in check.obstacles for line in obstacle.split("\n")]
    accepted = [Item(part=f"{number}.", detail=line) for number, line in enumerate(check.accepted, start=1)]
    sections = {"restored": check.restored, "not restored": check.not_restored, "accepted by --resume-anyway": accepted}
    return [head, *obstacles, *(line for title, items in sections.items() for line in _section(title, items))]


def _section(title: str, items: Sequence[Item]) -> list[str]:
    if not items:
        return []
    width = max(len(item.part) for item in items)
    next_line = "\n" + " " * (4 + width)
    text = "\n".join(f"  {item.part:<{width}}  " + item.detail.replace("\n", next_line) for item in items)
    return [f"{title}:", *text.split("\n")]
