"""`retrain replay RUN --step N`: a stored step as recorded, and its gradient under other credit and losses."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from retrain.inspect.replay.job import replay_step
from retrain.inspect.replay.show import lines
from retrain.records.files import write_text
from retrain.text.command_options import html_option, json_option, run_argument
from retrain.text.terminal_text import printable

EPILOG = """\b
Examples:
  retrain replay logs/train --step 12                      only as it was: the same bits?
  retrain replay logs/train --step 12 --loss gspo --advantage rloo
  retrain replay logs/train --step 12 --try loss=ppo --try recipe=dapo --html replay.html

\b
Exit codes: 0 done; 1 failed; 2 usage error, or a step that cannot be replayed.
"""


@click.command("replay", epilog=EPILOG)
@run_argument()
@click.option("--step", type=int, required=True, help="Which step; its tokens must be stored.")
@click.option(
    "--try", "tries", multiple=True, metavar="KEY=VALUE,...", help="A condition; repeat it to compare several."
)
@click.option("--loss", default="", help="Another loss; this and the next three make one more condition.")
@click.option("--advantage", default="", help="Another advantage_mode.")
@click.option("--transform", default="", help="Another transform_mode.")
@click.option("--uncertainty", default="", help="Another uncertainty_kind.")
@click.option("--resamples", type=click.IntRange(0), default=1000, show_default=True, help="0: one pass per condition.")
@click.option("--most", type=click.IntRange(0), default=3, show_default=True, help="Prompts and tokens named for each.")
@html_option("Write a self-contained page.")
@json_option()
@click.pass_context
def command(
    ctx: click.Context,
    /,
    run: Path,
    step: int,
    tries: tuple[str, ...],
    resamples: int,
    most: int,
    html: Path | None,
    as_json: bool,
    **named: str,
) -> None:
    """Replay a step of RUN from its stored tokens, and compare the gradient under other credit and losses.

    Nothing is sampled and RUN is not changed. It is one step: directions at one policy, no outcome of training.
    """
    one = ",".join(f"{key}={value}" for key, value in named.items() if value)
    found = replay_step(run, step, [*([one] if one else []), *tries], ctx.obj, resamples=resamples, most=most)
    data = asdict(found)
    if html is not None:
        from retrain.inspect.replay.page import render

        write_text(html, render(data))
        click.echo(f"Wrote {printable(str(html))}", err=as_json)
    if as_json:
        click.echo(json.dumps(data, indent=2, allow_nan=False))
    else:
        click.echo("\n".join(map(printable, lines(data))))
