"""Shows what `retrain init` found in the data: columns, examples, what the verifier reads in a perfect answer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from retrain.cli.start.own_data import DataChoice
from retrain.cli.start.trial import Trial, Tried
from retrain.cli.start.written import FEWEST, held_out
from retrain.text.terminal_text import printable

MOST_LINES, MOST_CHARS = 12, 400


def show_trial(choice: DataChoice, trial: Trial) -> None:
    """Print it; data and model output are neutralised for the terminal."""
    for told in (*choice.told, *trial.notes):
        click.echo(printable(told))
    aside = held_out(trial.examples)
    click.echo(f"{trial.examples - aside} examples to train on, {aside} held out")
    for number, example in enumerate(trial.shown, start=1):
        click.echo(f"\nExample {number} of {trial.examples}, as the model sees it:")
        for line in _cut(example.prompt):
            click.echo(f"  | {printable(line)}")
        click.echo(f"  reference            {_text(example.reference)}")
        for name, tried in (("perfect answer", example.perfect), ("reference alone", example.alone)):
            if tried:
                click.echo(f"  {name:<20} {_text(tried.text)}: {_verdict(tried)}")
    click.echo(f"\nReward audit of {printable(', '.join(trial.rewards))}: passed")
    for warning in warnings_of(trial):
        click.secho(f"warning: {printable(warning)}", fg="yellow")


def warnings_of(trial: Trial) -> list[str]:
    """What the user should know before training."""
    few = f"{trial.examples} examples are too few to hold some out (at least {FEWEST}): nothing will be evaluated"
    return [*trial.warnings, *([few] if trial.examples < FEWEST else [])]


def as_data(choice: DataChoice, trial: Trial) -> dict[str, Any]:
    """The same for programs."""
    shown = [asdict(example) for example in trial.shown]
    counts = {"examples": trial.examples, "held_out": held_out(trial.examples)}
    told = {"columns": choice.told, "notes": list(trial.notes), "warnings": warnings_of(trial)}
    return {"data": choice.settings, **counts, **told, "rewards": list(trial.rewards), "shown": shown}


def _verdict(tried: Tried) -> str:
    read = (
        f"the verifier reads {_text(tried.read) if tried.read is not None else 'no answer'}, " if tried.is_read else ""
    )
    return f"{read}score {tried.score}"


def _cut(text: str) -> list[str]:
    lines = text[:MOST_CHARS].splitlines() or [""]
    is_cut = len(text) > MOST_CHARS or len(lines) > MOST_LINES
    return [*lines[:MOST_LINES], "..."] if is_cut else lines


def _text(text: str) -> str:
    shown = printable(" ".join(text.split())) or "(empty)"
    return shown if len(shown) <= MOST_CHARS // 4 else f"{shown[: MOST_CHARS // 4]}..."
