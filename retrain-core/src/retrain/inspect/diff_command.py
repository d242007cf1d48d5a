"""`retrain diff A B`: results of two runs, and why they differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from retrain.inspect.diff import RunDiff, compare_runs
from retrain.records.identity.changes import ADDED, CHANGED, REMOVED, ChangeKind
from retrain.text.amounts import ABSENT, decimal, duration, percent
from retrain.text.command_options import json_option
from retrain.text.tables import rich_table, table_console
from retrain.text.terminal_text import printable, sparkline
from retrain.verdicts.ledger.looks import InterimLooks

_FOLDER = click.Path(path_type=Path)
EPILOG = """\b
Examples:
  retrain diff logs/run_a logs/run_b
  retrain diff logs/run_a logs/run_b --json

\b
Exit codes: 0 done, whatever differs; 2 usage error, or no run there.
"""


@click.command("diff", epilog=EPILOG)
@click.argument("a", type=_FOLDER)
@click.argument("b", type=_FOLDER)
@json_option()
def command(a: Path, b: Path, as_json: bool) -> None:
    """Compare the run folders A and B: results, settings, code, packages, data, and where they diverge."""
    diff = compare_runs(a, b)
    InterimLooks("diff").at([a, b])
    if as_json:
        click.echo(json.dumps(asdict(diff), indent=2, allow_nan=False, default=str))
    else:
        table_console().print(picture(diff))


MOST_FIELDS = 8
VALUE_CHARS = 60
# A lower policy-gradient loss does not make a run better, nor do more steps.
HIGHER, LOWER, NEITHER = 1, -1, 0
DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}
WHAT = {CHANGED: "differs", ADDED: "only in B", REMOVED: "only in A"}
PARTS = {
    "examples": "other prompts",
    "completions": "the same prompts, other completions",
    "tokens": "the same texts, other tokens",
    "missing": "one run has no completions for it",
}


def picture(diff: RunDiff) -> RenderableType:
    heads = Table.grid(padding=(0, 2))
    for name, label, status in (("A", diff.label_a, diff.status_a), ("B", diff.label_b, diff.status_b)):
        heads.add_row(name, Text(printable(label)), Text(printable(status)))
    parts: list[RenderableType] = [heads, Text(), Text(verdict(diff), style="bold"), Text(), _results(diff), Text()]
    for name, rates in (("A", diff.curve_a), ("B", diff.curve_b)):
        if rates:
            ends = f"  {percent(rates[0])} → {percent(rates[-1])}"
            parts.append(Text(f"correct {name}  ").append(sparkline(rates), style="green").append(ends))
    for title, rows in (
        ("Settings", _settings(diff)),
        ("Code", iter([Text(_code(diff))])),
        ("Inputs", _inputs(diff)),
        ("Packages", _pairs(diff.packages)),
        ("Data", _data(diff)),
        ("Metrics", _metrics(diff)),
    ):
        shown = list(rows)
        parts += [Text(), Text(title, style="bold"), *(shown or [Text("  no difference")])]
    return Group(*parts)


def verdict(diff: RunDiff) -> str:
    metrics, data = diff.metrics, diff.data
    if not metrics.common_steps:
        return "Nothing to compare: the runs have no finished step in common."
    if diff.identical:
        return f"Identical: {metrics.common_steps} steps, the same batches, the same numbers (timing aside)."
    firsts = [step for step in (data.first_differing_batch, metrics.first_diverging_step) if step is not None]
    if firsts:
        return f"The runs differ from {_named(min(firsts))} on."
    return f"Identical up to the shorter run ({metrics.common_steps} steps)."


def _results(diff: RunDiff) -> Table:
    a, b = diff.final_a, diff.final_b
    table = rich_table(("at the end", "A", "B"))
    table.add_column("better")
    reward = partial(decimal, digits=3)
    rows: list[tuple[str, float | None, float | None, int, Callable[[float | None], str]]] = [
        ("loss", a["loss"], b["loss"], NEITHER, partial(decimal, digits=4)),
        ("correct", a["correct_rate"], b["correct_rate"], HIGHER, percent),
        ("reward", a["mean_reward"], b["mean_reward"], HIGHER, reward),
        ("held-out", a["eval_correct_rate"], b["eval_correct_rate"], HIGHER, percent),
        ("held-out reward", a["eval_mean_reward"], b["eval_mean_reward"], HIGHER, reward),
        ("time", diff.wall_time_a, diff.wall_time_b, LOWER if diff.steps_a == diff.steps_b else NEITHER, duration),
        ("steps", diff.steps_a, diff.steps_b, NEITHER, partial(decimal, digits=0)),
    ]
    if not any(each["eval_mean_reward"] not in (None, each["eval_correct_rate"]) for each in (a, b)):
        rows = [row for row in rows if row[0] != "held-out reward"]  # the rate says it
    for name, value_a, value_b, better, form in rows:
        table.add_row(name, form(value_a), form(value_b), mark(value_a, value_b, better))
    return table


def mark(a: float | None, b: float | None, better: int) -> str:
    """Return `< A`, `B >` or `=`; empty if neither is better or a number is missing."""
    if a is None or b is None:
        return ""
    if a == b:
        return "="
    return "" if better == NEITHER else ("< A" if (a > b) == (better == HIGHER) else "B >")


def _settings(diff: RunDiff) -> Iterator[RenderableType]:
    if not diff.config:
        return
    table = Table.grid(padding=(0, 2))
    for path, sides in diff.config.items():
        cells = [
            Text(_value(sides, side)).append(f"  {printable(sides.get(f'origin_{side}', ''))}", style="dim")
            for side in "ab"
        ]
        table.add_row(Text(printable(path)), *cells)
    yield table


def _pairs(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[RenderableType]:
    if not rows:
        return
    table = Table.grid(padding=(0, 2))
    for name, sides in rows.items():
        table.add_row(Text(printable(name)), Text(_value(sides, "a")), Text(_value(sides, "b")))
    yield table


def _code(diff: RunDiff) -> str:
    def named(code: Mapping[str, Any]) -> str:
        commit = printable(str(code["commit"]))[:12] if code["commit"] else "no commit known"
        return f"{commit} with uncommitted changes" if code["dirty"] else commit

    a, b = named(diff.code.a), named(diff.code.b)
    if diff.code.same is None:
        is_known = diff.inputs is not None and not any(each.kind == ChangeKind.CODE for each in diff.inputs)
        known = "; the project's code that they used is the same" if is_known else ""
        shown = a if a == b else f"A {a}, B {b}"
        return f"  cannot be distinguished: {shown}{known}"
    return f"  no difference: {a}" if diff.code.same else f"  A {a}, B {b}"


def _inputs(diff: RunDiff) -> Iterator[RenderableType]:
    for name, accepted in (("A", diff.accepted_a), ("B", diff.accepted_b)):
        yield from (Text(f"  {name} was {printable(change)}", style="yellow") for change in accepted)
    if diff.inputs is None:
        yield Text("  unknown: a run recorded no hashes of its code and data")
    for each in diff.inputs or ():
        place = f"{each.name} of {each.distribution}" if each.distribution else each.name
        yield Text(f"  {each.kind}  {printable(place)}  {printable(WHAT.get(each.what, each.what))}")
        for line in each.diff:
            yield Text(f"    {printable(line.expandtabs(4))}", style=DIFF_STYLES.get(line[:1], "dim"))


def _data(diff: RunDiff) -> Iterator[RenderableType]:
    data = diff.data
    yield Text(f"  examples seen: A {data.examples_a}, B {data.examples_b}, both {data.examples_both}")
    for name, only, seen in (("A", data.only_a, data.examples_a), ("B", data.only_b, data.examples_b)):
        if only:
            left = seen - data.examples_both - len(only)
            more = f" and {left} more" if left else ""
            yield Text(f"  only in {name}: {', '.join(map(printable, only))}{more}")
    if data.first_differing_batch is None or data.differing_part is None:
        yield Text("  no differing batch")
    else:
        yield Text(f"  first differing batch: {_named(data.first_differing_batch)} ({PARTS[data.differing_part]})")


def _metrics(diff: RunDiff) -> Iterator[RenderableType]:
    metrics = diff.metrics
    if metrics.first_diverging_step is not None:
        yield Text(f"  first divergence: {_named(metrics.first_diverging_step)}, in {len(metrics.fields)} fields")
        yield from _pairs(dict(list(metrics.fields.items())[:MOST_FIELDS]))
        if len(metrics.fields) > MOST_FIELDS:
            yield Text(f"    and {len(metrics.fields) - MOST_FIELDS} more: --json has all of them", style="dim")
    for name, only in (("A", metrics.only_a), ("B", metrics.only_b)):
        if only:
            yield Text(f"  only in {name}: {', '.join(map(printable, only))}")


def _named(step: int) -> str:
    return "the evaluation before training" if step == -1 else f"step {step}"


def _value(sides: Mapping[str, Any], side: str) -> str:
    if side not in sides or sides[side] is None:
        return ABSENT
    value = sides[side]
    shown = printable(value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str))
    return shown if len(shown) <= VALUE_CHARS else shown[: VALUE_CHARS - 3] + "..."
