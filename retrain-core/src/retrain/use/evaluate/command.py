"""`retrain eval`: correct rate, interval and pass@k of whatever was trained, on the sets of its run or on others."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.run.opened import subject_config
from retrain.run.subject import find_subject
from retrain.text.amounts import percent, rate_interval
from retrain.text.command_options import config_argument, json_option
from retrain.text.tables import table_lines
from retrain.text.terminal_text import printable
from retrain.use.evaluate.subjects import Request, Result, evaluate_subject

NAME, PORT = "policy", 8000
URL = f"http://127.0.0.1:{PORT}/v1"
CLIENTS = ("lm-eval", "inspect")
EPILOG = """\b
Examples:
  retrain eval logs/train                          its own sets: held-out examples and [eval.sets]
  retrain eval logs/train --checkpoint base --checkpoint all
  retrain eval logs/a logs/b --data tasks.jsonl --reward math --samples 8
  retrain eval Qwen/Qwen3-0.6B --data tasks.jsonl --reward match --greedy --json
  retrain eval logs/train --to lm-eval             the command that runs lm-eval on it

\b
Exit codes: 0 done; 1 failed; 2 usage or configuration error.
"""
FILE, FOLDER = click.Path(path_type=Path, dir_okay=False, exists=True), click.Path(path_type=Path, file_okay=False)
PASS = "pass_at_"
HEADS = ("policy", "steps", "set", "examples", "correct", "95 %", "pass@k", "reward")
NOTE = "Each interval is about one policy. To compare two over several seeds, use `retrain compare`."


def client_lines(client: str, named: str, checkpoint: str, plugins: Plugins) -> list[str]:
    """Return the commands with which another evaluation judges a policy: the server, and its client."""
    subject = find_subject(named, checkpoint)
    chosen = ["--checkpoint", checkpoint] if checkpoint else []
    serve = shlex.join(["retrain", "serve", named, *chosen, "--name", NAME, "--port", str(PORT)])
    if client == "lm-eval":
        base = subject_config(subject, plugins).config.model.model
        folder = plugins.locate_model(base) or base
        given = f"model={NAME},base_url={URL}/completions,tokenizer={folder},tokenized_requests=False"
        words = ["lm_eval", "--model", "local-completions", "--model_args", given, "--tasks", "gsm8k"]
        call = f"OPENAI_API_KEY=TOKEN {shlex.join(words)}"
    else:
        words = ["inspect", "eval", "inspect_evals/gsm8k", "--model", f"openai-api/retrain/{NAME}"]
        call = f"RETRAIN_API_KEY=TOKEN RETRAIN_BASE_URL={URL} {shlex.join(words)}"
    return ["# in one terminal; it prints the TOKEN", serve, "# in another", call]


@click.command("eval", context_settings={"ignore_unknown_options": True}, epilog=EPILOG)
@click.option("--eval-set", "sets", multiple=True, metavar="NAME", help="Only this set; held_out is the set of [eval].")
@click.option("--checkpoint", "checkpoints", multiple=True, help="Of a run: best, final, a number of steps, base, all.")
@click.option("--config", "file", type=FILE, help="Configuration of a model or adapter; for a run, further sets.")
@click.option("--data", default="", metavar="FILE|SOURCE", help="Evaluate on these examples instead.")
@click.option("--reward", default="", metavar="NAME", help="With --data: the reward to use; default: the run's.")
@click.option("--examples", type=click.IntRange(1), help="With --data: this many, drawn by seed; default: all.")
@click.option("--samples", type=click.IntRange(1), help="With --data: completions per example.")
@click.option("--greedy", is_flag=True, help="With --data: always take the most likely token.")
@click.option("--out", type=FOLDER, help="Folder of the results; default: evaluations in the run's folder.")
@click.option("--save-every", "at_once", type=click.IntRange(1), default=256, show_default=True, help="Examples.")
@click.option("--to", "client", type=click.Choice(CLIENTS), help="Print the command that runs another evaluator.")
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

    A run is evaluated as during training: on its held-out examples and the sets of [eval.sets], with the same
    random streams. Keys of the configuration are flags here as anywhere: --temperature 0.7, --eval-samples 16. Results
    are recorded, so that an interrupted command continues where it stopped."""
    count = next((number for number, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    names, overrides = arguments[:count], arguments[count:]
    if not names:
        raise click.UsageError("nothing to evaluate is named: give a run, an adapter or a model")
    changed = {"examples": examples, "samples": samples, "greedy": greedy or None}
    changed = {key: value for key, value in changed.items() if value is not None}
    if (changed or given["reward"]) and not given["data"]:
        flag = next(iter(changed), "reward")
        fix = f"add --data, or write --eval-{flag}" if flag in ("examples", "samples") else "add --data"
        raise ConfigError(Problem(code="eval.needs-data", where=f"--{flag}", what="needs --data", fix=fix))
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
    lines = table_lines(HEADS, map(_row, results), num_names=len(HEADS))
    notes = list(dict.fromkeys(_notes(results)))
    folders = list(dict.fromkeys(str(result.file.parent) for result in results))
    click.echo("\n".join(map(printable, [*lines, "", *notes, f"Scores of every example: {', '.join(folders)}"])))


def _row(result: Result) -> tuple[str, ...]:
    fields, subject = result.fields, result.subject
    sizes = sorted(int(name.removeprefix(PASS)) for name in fields if name.startswith(PASS))
    return (
        subject.label,
        "-" if subject.steps is None else str(subject.steps),
        result.set,
        f"{fields['examples']} x {fields['samples']}",
        percent(fields["correct_rate"]),
        rate_interval(fields["ci_low"], fields["ci_high"]),
        " ".join(f"@{size} {100 * fields[f'{PASS}{size}']:.1f}" for size in sizes),  # in percent
        f"{fields['mean_reward']:.3f}" if "mean_reward" in fields else "none",
    )


def _notes(results: Sequence[Result]) -> Iterator[str]:
    repeated = [(result, *result.own) for result in results if result.own]
    if same := sum(total for _, equal, total in repeated if equal == total):
        yield f"{same} samples equal the run's own evaluation at that step."
    for result, equal, total in repeated:
        if equal < total:
            different = f"{result.subject.label}, {result.set}: {total - equal} of {total} samples differ"
            yield f"{different} from the run's own evaluation: another machine, engine or version, or rounding."
    if len({(result.subject.label, result.subject.steps) for result in results}) > 1:
        yield NOTE
