"""What every stateful part must do: return its state as JSON, and continue from it as if never interrupted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from retrain.testing.check import expect


def expect_plain_state(part: Any) -> dict[str, Any]:
    """What `state` returns, after the JSON round trip that a checkpoint makes."""
    state = part.state()
    expect(
        isinstance(state, Mapping),
        f"state() returned {type(state).__name__}",
        why="it is written into trainer_state.json",
        fix="return a dictionary, {} when there is nothing to keep",
    )
    try:
        text = json.dumps(dict(state), allow_nan=False)
    except (TypeError, ValueError) as error:
        expect(
            False,
            f"state() is not JSON: {error}",
            why="it is written into trainer_state.json",
            fix="keep plain numbers, text, lists and tables; no arrays, no NaN",
        )
        raise
    plain: dict[str, Any] = json.loads(text)
    expect(
        json.dumps(dict(part.state()), allow_nan=False) == text,
        "state() gives something else when asked again",
        why="it is asked at every checkpoint, and must change nothing",
        fix="compute nothing in state()",
    )
    return plain


def expect_same(went_on: Any, resumed: Any, *, what: str) -> None:
    """Expect the restored part to do what the uninterrupted one does."""
    expect(
        went_on == resumed,
        f"{what}: {went_on!r:.300} without a resume, {resumed!r:.300} after one",
        why="a run that is resumed must be the run that was never interrupted",
        fix="put all that the part remembers into state(), and take it back in restore()",
    )


def expect_plain_metrics(metrics: Any, *, allows_text: bool) -> None:
    """Expect valid fields for a line of `metrics.jsonl`."""
    expect(
        isinstance(metrics, Mapping),
        f"metrics() returned {type(metrics).__name__}",
        why="its fields are added to the step's line",
        fix="return a dictionary, {} when there is nothing to say",
    )
    plain = (int, float, bool, str) if allows_text else (int, float, bool)
    for name, value in metrics.items():
        expect(
            isinstance(name, str) and isinstance(value, plain) and _is_finite(value),
            f"metrics() returned {name!r} = {value!r}",
            why="a line of metrics.jsonl holds finite numbers, so that every reader can plot it",
            fix="leave the field out while there is nothing to say; convert numpy numbers with float()",
        )


def _is_finite(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
