"""A replay as a page: one self-contained HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrain.inspect.replay.show import SEVERAL, lines
from retrain.report.parts import Paragraph, Part, Plot, Pre, Section, Table, Tiles, note, plain
from retrain.report.shell import sections_page

COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6", "c7")  # of the style sheet
LONGEST = 32  # letters of a name on an axis
Data = Mapping[str, Any]


def render(data: Data) -> str:
    """Return the page; names, prompts and tokens are untrusted and escaped."""
    others = data["conditions"][1:]
    title, *as_it_was = lines({**data, "conditions": [], "updates": 1})
    parts: list[Part | None] = [
        Pre("\n".join(line.strip() for line in as_it_was)),
        Paragraph([data["note"]], "lede"),
        note(SEVERAL.format(data["updates"])) if data["updates"] > 1 else None,
        Tiles("plots", _plots(others)) if others else None,
    ]
    sections = [Section("step", "As it was", parts)]
    sections += [Section(f"condition-{number}", each["name"], _tables(each)) for number, each in enumerate(others, 1)]
    return sections_page("retrain replay", title, sections)


def _plots(others: Sequence[Data]) -> list[Plot]:
    """Plot cosine with its interval, norm and clipped share of each condition, and each group's part of the turn."""
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
    shapes = {"shapes": [{**line, "line": {"color": "soft", "dash": "dash"}}]}
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
        _by_condition("Cosine to the gradient taken", [dots], len(names), **shapes),
        _bars("Norm / taken", names, colours, [each["norm_ratio"] for each in others], ".2f"),
        _bars("Clipped tokens", names, colours, [each["clip_fraction"] for each in others], ".1%"),
        Plot("Part of 1 - cosine, by prompt", "", turn, kind="tall"),
    ]


def _bars(title: str, names: Sequence[str], colours: Sequence[str], values: Sequence[float | None], form: str) -> Plot:
    texts = ["-" if value is None else format(value, form) for value in values]
    bars: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "x": values,
        "y": names,
        "text": texts,
        "textposition": "outside",
    }
    bars |= {"marker": {"color": colours}, "cliponaxis": False}
    most = max([0.01, *(value for value in values if value is not None)])
    axis = {"range": [0.0, 1.25 * most], "nticks": 4, "tickformat": form if form.endswith("%") else ""}
    return _by_condition(title, [bars], len(names), xaxis=axis)


def _by_condition(title: str, traces: Sequence[Data], num_rows: int, **layout: Any) -> Plot:
    layout |= {"height": 90 + 46 * num_rows, "yaxis": {"autorange": "reversed"}}
    return Plot(title, "", {"kind": "traces", "traces": traces, "layout": layout})


def _tables(condition: Data) -> list[Part]:
    cosine = condition["cosine"]
    told = "no direction" if cosine is None else f"cosine {cosine:.4f}"
    trained = f"{condition['trained_tokens']} tokens of {condition['trained_groups']} groups trained"
    found: list[Part] = [Paragraph([f"{told}, {trained}, loss {condition['loss']:.6g}"])]
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
