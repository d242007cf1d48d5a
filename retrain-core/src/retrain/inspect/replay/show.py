"""A replay as lines for the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrain.text.tables import table_lines

SEVERAL = "The run took {} updates with these rows; compared is the gradient of all of them before the first one."
HEADS = ("", "cosine", "95 % of resampled groups", "norm / taken", "clipped", "tokens", "groups")
ZERO = "The gradient taken is 0, so it has no direction to compare with."
Data = Mapping[str, Any]


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
        return [*told, f"  as it was: the same bits in {numbers}{files}"]
    other = [name for name, is_same in found["files"].items() if not is_same]
    told.append("  as it was: the same step, but not the same bits")
    told += [
        f"    step {each['step']} {each['field']}: {each['now']}, recorded {each['was']}" for each in found["different"]
    ]
    return [*told, *(f"    {name} differs from that of {found['after']}" for name in other)]


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
    told = ["", f"{condition['name']}: what turns it most"]
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
