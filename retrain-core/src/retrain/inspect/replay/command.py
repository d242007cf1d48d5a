"""`retrain replay RUN --step N`: a stored step as recorded, and its gradient under other credit and losses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from retrain.inspect.replay.job import replay_step
from retrain.records.files import write_text
from retrain.report.parts import Paragraph, Part, Plot, Pre, Section, Table, Tiles, note, plain
from retrain.report.shell import sections_page
from retrain.text.command_options import html_option, json_option, run_argument
from retrain.text.tables import table_lines
from retrain.text.terminal_text import printable

COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6", "c7")  # of the style sheet
# Longer names of conditions leave no room for the plot on a phone.
LONGEST = 32
SEVERAL = "The run took {} updates with these rows; compared is the gradient of all of them before the first one."
HEADS = ("condition", "cosine", "95 % of resampled groups", "norm / taken", "clipped", "tokens", "groups")
ZERO = "The gradient taken is 0, so it has no direction to compare with."
Data = Mapping[str, Any]
EPILOG = """\b
Examples:
  retrain replay logs/train --step 12                      only the recorded update: is it bit-identical?
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
@click.option(
    "--resamples",
    type=click.IntRange(0),
    default=1000,
    show_default=True,
    help="Bootstrap resamples; 0: one pass per condition.",
)
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
        write_text(html, render(data))
        click.echo(f"Wrote {printable(str(html))}", err=as_json)
    if as_json:
        click.echo(json.dumps(data, indent=2, allow_nan=False))
    else:
        click.echo("\n".join(map(printable, lines(data))))


# The lines of the console.


def lines(data: Data) -> list[str]:
    found = [f"Step {data['step']} of {data['run']}", *_told_as_it_was(data["as_it_was"])]
    if len(data["conditions"]) > 1:
        found += ["", *table_lines(HEADS, map(_row, data["conditions"]))]
        if data["conditions"][0]["cosine"] is None:
            found += ["", ZERO]
        for condition in data["conditions"][1:]:
            found += _told_turns(condition)
    if data["updates"] > 1:
        found += ["", SEVERAL.format(data["updates"])]
    return [*found, "", data["note"]] if len(data["conditions"]) > 1 else found


def _told_as_it_was(found: Data) -> list[str]:
    forward, start = found["forward"], found["start"] or "the beginning of the run"
    trained = f", {len(forward)} step{'s' * (len(forward) != 1)} trained forward on stored tokens" if forward else ""
    told = [f"  from {start}{trained}"]
    same = [name for name, is_same in found["files"].items() if is_same]
    if found["is_exact"]:
        files = f"; {', '.join(same)} of {found['after']}" if same else "; there is no checkpoint after it to compare"
        numbers = f"all {len(found['compared'])} numbers of its optimizer step"
        return [*told, f"  as recorded: the same bits in {numbers}{files}"]
    other = [name for name, is_same in found["files"].items() if not is_same]
    told.append("  as recorded: the same step, but not the same bits")
    told += [
        f"    step {each['step']} {each['field']}: {each['now']}, recorded {each['was']}" for each in found["different"]
    ]
    return [*told, *(f"    {name} differs from the file of {found['after']}" for name in other)]


def _row(condition: Data) -> tuple[str, ...]:
    low, high = condition["low"], condition["high"]
    return (
        condition["name"],
        _number(condition["cosine"]),
        f"{low:.4f} to {high:.4f}" if low is not None and condition["name"] != "as taken" else "",
        _number(condition["norm_ratio"]),
        f"{condition['clip_fraction']:.2%}",
        str(condition["trained_tokens"]),
        str(condition["trained_groups"]),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _told_turns(condition: Data) -> Sequence[str]:
    if not (condition["prompts"] or condition["tokens"]):
        return []
    told = ["", f"{condition['name']}: most of its turn"]
    turned = 1.0 - condition["cosine"]
    told += [
        f"  prompt {each['example_id']} (group {each['group']}): {each['part'] / turned:.0%} of the turn"
        for each in condition["prompts"]
    ]
    for each in condition["tokens"]:
        reward = "none" if each["reward"] is None else f"{each['reward']:.4g}"
        where = f"{each['group']}.{each['index']}:{each['position']}, reward {reward}"
        told.append(f"  token {each['token']!r} ({where}): weight {each['before']:+.3g} -> {each['after']:+.3g}")
    return told


# The page; it needs no network.


def render(data: Data) -> str:
    """Return the page; names, prompts and tokens are untrusted and escaped."""
    others = data["conditions"][1:]
    title, *as_it_was = lines({**data, "conditions": [], "updates": 1})
    parts: list[Part | None] = [
        Pre("\n".join(line.strip() for line in as_it_was)),
        Paragraph([data["note"]], "lede"),
        note(SEVERAL.format(data["updates"])) if data["updates"] > 1 else None,
        Table("Conditions", HEADS, [_row(each) for each in data["conditions"]]) if others else None,
        Tiles("plots", _plots(others)) if others else None,
    ]
    sections = [Section("step", "As it was", parts)]
    sections += [Section(f"condition-{number}", each["name"], _tables(each)) for number, each in enumerate(others, 1)]
    return sections_page("retrain replay", title, sections)


def _plots(others: Sequence[Data]) -> list[Plot]:
    names = [f"{number}. {plain(each['name'], LONGEST)}" for number, each in enumerate(others, start=1)]
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(others))]
    cosines = [each["cosine"] for each in others]
    ends = {
        "type": "data",
        "symmetric": False,
        "array": [(each["high"] or each["cosine"] or 0.0) - (each["cosine"] or 0.0) for each in others],
        "arrayminus": [(each["cosine"] or 0.0) - (each["low"] or each["cosine"] or 0.0) for each in others],
        "thickness": 2,
        "color": "ink",
    }
    dots = {"type": "scatter", "mode": "markers", "x": cosines, "y": names, "error_x": ends}
    dots |= {"marker": {"color": colours, "size": 10}, "hovertemplate": "%{y}: %{x:.4f}<extra></extra>"}
    line = {"type": "line", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper"}
    rows = {"height": 90 + 46 * len(names), "yaxis": {"autorange": "reversed"}}
    rows |= {"shapes": [{**line, "line": {"color": "soft", "dash": "dash"}}]}
    turned = [
        {
            "type": "bar",
            "name": name,
            "x": list(range(len(each["parts"]))),
            "y": each["parts"],
            "marker": {"color": colour},
            "hovertemplate": "prompt of group %{x}: %{y:.3g}",
        }
        for name, colour, each in zip(names, colours, others, strict=True)
    ]
    by_group = {"barmode": "group", "showlegend": True, "legend": {"orientation": "h", "y": -0.3, "yanchor": "top"}}
    by_group |= {"xaxis": {"title": {"text": "group of the step", "standoff": 4}, "dtick": 1}}
    turn = {"kind": "traces", "traces": turned, "layout": by_group}
    return [
        Plot("Cosine to the gradient taken", "", {"kind": "traces", "traces": [dots], "layout": rows}),
        Plot("Part of 1 - cosine, by prompt", "", turn, kind="tall"),
    ]


def _tables(condition: Data) -> list[Part]:
    cosine = condition["cosine"]
    direction = "no direction" if cosine is None else f"cosine {cosine:.4f}"
    trained = f"{condition['trained_tokens']} tokens of {condition['trained_groups']} groups trained"
    found: list[Part] = [Paragraph([f"{direction}, {trained}, loss {condition['loss']:.6g}"])]
    if condition["prompts"]:
        rows = [
            (each["prompt"], each["example_id"], str(each["group"]), f"{each['part'] / (1.0 - cosine):.1%}")
            for each in condition["prompts"]
        ]
        found.append(Table("Prompts", ("prompt", "example", "group", "of the turn"), rows, num_names=2))
    if condition["tokens"]:
        changes = [
            (
                repr(each["token"]),
                f"group {each['group']}, completion {each['index']}, token {each['position']}",
                "-" if each["reward"] is None else f"{each['reward']:g}",
                f"{each['before']:+.3g}",
                f"{each['after']:+.3g}",
            )
            for each in condition["tokens"]
        ]
        heads = ("token", "where", "reward", "weight taken", "weight here")
        found.append(Table("Tokens", heads, changes, num_names=2))
    return found
