"""A replay as plain data, and as lines for the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrain.inspect.replay.gradients import largest
from retrain.inspect.replay.job import AsItWas, Replay, Seen
from retrain.records.run import StoredCompletion
from retrain.text.tables import table_lines
from retrain.text.token_text import token_texts

ONE_STEP = (
    "One step: directions of the gradient at one policy. What training under these conditions would have led to, "
    "it does not say."
)
SEVERAL = "The run took {} updates with these rows; compared is the gradient of all of them before the first one."
ZERO = "The gradient taken is 0, so it has no direction to compare with."
Data = Mapping[str, Any]


def as_data(replay: Replay, most: int) -> dict[str, Any]:
    """Everything that was found, with the texts of what it names; those are untrusted."""
    return {
        "run": str(replay.run),
        "step": replay.step,
        "updates": replay.updates,
        "as_it_was": _as_it_was(replay.as_it_was, replay.step),
        "conditions": [_condition(replay, seen, most) for seen in replay.conditions],
        "resamples": replay.resamples,
        "passes": replay.passes,
        "note": ONE_STEP,
    }


def lines(data: Data) -> list[str]:
    """The console's lines."""
    found = [f"Step {data['step']} of {data['run']}", *_told_as_it_was(data["as_it_was"])]
    if len(data["conditions"]) > 1:
        found += ["", *_table(data)]
        if data["conditions"][0]["cosine"] is None:
            found += ["", ZERO]
        for condition in data["conditions"][1:]:
            found += _told_turns(condition)
    if data["updates"] > 1:
        found += ["", SEVERAL.format(data["updates"])]
    return [*found, "", data["note"]] if len(data["conditions"]) > 1 else found


def _as_it_was(found: AsItWas, step: int) -> dict[str, Any]:
    def differences(number: int, different: Mapping[str, tuple[Any, Any]]) -> list[dict[str, Any]]:
        return [{"step": number, "field": name, "was": was, "now": now} for name, (was, now) in different.items()]

    every = [*found.forward.items(), (step, found.step)]
    return {
        "start": found.start,
        "forward": list(found.forward),
        "is_exact": found.is_exact,
        "compared": list(found.step.compared),
        "different": [each for number, agreed in every for each in differences(number, agreed.different)],
        "after": found.after,
        "files": dict(found.files),
    }


def _condition(replay: Replay, seen: Seen, most: int) -> dict[str, Any]:
    turn = seen.turn
    return {
        "name": seen.name,
        "cosine": turn.cosine,
        "low": turn.low,
        "high": turn.high,
        "norm": turn.norm,
        "norm_ratio": turn.norm_ratio,
        "loss": seen.loss,
        "clip_fraction": seen.clip_fraction,
        "trained_tokens": seen.trained_tokens,
        "trained_groups": seen.trained_groups,
        "parts": [turn.parts.get(group) for group in range(len(replay.groups))] if turn.parts else [],
        "prompts": [_prompt(replay, group, part) for group, part in largest(turn.parts, most)],
        "tokens": [
            {
                "group": change.group,
                "index": change.index,
                "position": change.position,
                "before": change.before,
                "after": change.after,
                **_token(replay, change.group, change.index, change.position),
            }
            for change in seen.tokens
        ],
    }


def _prompt(replay: Replay, group: int, part: float) -> dict[str, Any]:
    example = replay.groups[group].example
    text = example.prompt if isinstance(example.prompt, str) else str(example.prompt[-1].get("content", ""))
    return {"group": group, "example_id": example.id, "part": part, "prompt": text}


def _token(replay: Replay, group: int, index: int, position: int) -> dict[str, Any]:
    member: StoredCompletion = replay.stored.groups[group][index]
    texts = token_texts(replay.tokenizer, member.tokens.tokens_T.tolist())
    return {"token": texts[position], "reward": member.reward}


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


def _table(data: Data) -> list[str]:
    heads = ("", "cosine", "95 % of resampled groups", "norm / taken", "clipped", "tokens", "groups")
    return table_lines(heads, map(_row, data["conditions"]))


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


def _reward(token: Data) -> str:
    return "none" if token["reward"] is None else f"{token['reward']:.4g}"


def _told_turns(condition: Data) -> Sequence[str]:
    if not (condition["prompts"] or condition["tokens"]):
        return []
    told = ["", f"{condition['name']}: what turns it most"]
    turned = 1.0 - condition["cosine"]
    told += [
        f"  prompt {each['example_id']} (group {each['group']}): {each['part'] / turned:.0%} of the turn"
        for each in condition["prompts"]
    ]
    return told + [
        f"  token {each['token']!r} ({each['group']}.{each['index']}:{each['position']}, reward {_reward(each)}): "
        f"weight {each['before']:+.3g} -> {each['after']:+.3g}"
        for each in condition["tokens"]
    ]
