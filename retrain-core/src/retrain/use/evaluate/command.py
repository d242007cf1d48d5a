"""`retrain eval`: correct rate, interval and pass@k of whatever was trained, on the sets of its run or on others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.text.command_options import config_argument, json_option
from retrain.text.terminal_text import printable
from retrain.use.evaluate.clients import CLIENTS, client_lines
from retrain.use.evaluate.show import table_lines
from retrain.use.evaluate.subjects import Request, Result, evaluate_subject

EPILOG = """\b
Examples:
  retrain eval logs/train                          its own sets: held-out examples and [eval.sets]
  retrain eval logs/train --checkpoint base --checkpoint all
  retrain eval logs/a logs/b --data tasks.jsonl --reward math --samples 8
  retrain eval Qwen/Qwen3-0.6B --data tasks.jsonl --reward match --greedy --json
  retrain eval logs/train --to lm-eval             what to type to let lm-eval judge it

\b
Exit codes: 0 done; 1 failed; 2 usage or configuration error.
"""
_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)
_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command("eval", context_settings={"ignore_unknown_options": True}, epilog=EPILOG)
@click.option("--eval-set", "sets", multiple=True, metavar="NAME", help="Only this set; held_out is that of [eval].")
@click.option("--checkpoint", "checkpoints", multiple=True, help="Of a run: best, final, a number of steps, base, all.")
@click.option("--config", "file", type=_FILE, help="Configuration of a model or adapter; for a run, further sets.")
@click.option("--data", default="", metavar="FILE|SOURCE", help="Evaluate on these examples instead.")
@click.option("--reward", default="", metavar="NAME", help="With --data: what judges; default: the run's reward.")
@click.option("--examples", type=click.IntRange(1), help="With --data: this many, drawn by seed; default: all.")
@click.option("--samples", type=click.IntRange(1), help="With --data: completions per example.")
@click.option("--greedy", is_flag=True, help="With --data: always take the most likely token.")
@click.option("--out", type=_FOLDER, help="Where results are kept; default: evaluations in the run's folder.")
@click.option("--save-every", "at_once", type=click.IntRange(1), default=256, show_default=True, help="Examples.")
@click.option("--to", "client", type=click.Choice(CLIENTS), help="Print how somebody else's evaluation is run.")
@json_option()
@config_argument("SUBJECT... [--KEY VALUE]...")
@click.pass_obj
def command(
    plugins: Plugins,
    /,
    arguments: tuple[str, ...],
    client: str | None,
    as_json: bool,
    examples: int | None,
    samples: int | None,
    greedy: bool,
    **given: Any,
) -> None:
    """Evaluate each SUBJECT: a run, a checkpoint, an adapter or a model.

    A run is evaluated as it evaluated itself: on its held-out examples and the sets of [eval.sets], with the same
    random streams. Keys of the configuration are flags here as anywhere: --temperature 0.7, --eval-samples 16. What is
    done is recorded, so that a command that was interrupted goes on where it stopped."""
    names, overrides = _split(arguments)
    changed = {"examples": examples, "samples": samples, "greedy": greedy or None}
    changed = {key: value for key, value in changed.items() if value is not None}
    if (changed or given["reward"]) and not given["data"]:
        flag = next(iter(changed), "reward")
        fix = f"add --data, or write --eval-{flag}" if flag in ("examples", "samples") else "add --data"
        raise ConfigError(Problem(where=f"--{flag}", what="says how --data is evaluated, which is not given", fix=fix))
    if client:
        for name in names:
            click.echo("\n".join(client_lines(client, name, (*given["checkpoints"], "")[0], plugins)))
        return
    results: list[Result] = []
    for name in names:
        request = Request(named=name, changed=changed, overrides=overrides, **given)
        results += evaluate_subject(request, plugins, lambda text: click.echo(printable(text), err=True))
    if as_json:
        click.echo(json.dumps({"results": [result.as_data() for result in results]}, indent=2, allow_nan=False))
        return
    click.echo("\n".join(map(printable, table_lines(results))))


def _split(arguments: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The subjects, which come first, and the overrides."""
    count = next((number for number, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    if not count:
        fix = "retrain eval SUBJECT, where SUBJECT is a run, an adapter or a model"
        raise ConfigError(Problem(where="command line", what="nothing to evaluate is named", fix=fix))
    return arguments[:count], arguments[count:]
