"""One step's completions, a few at a time, found in `generations.jsonl` without reading the rest of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retrain.kernel.config.toml_file import open_regular
from retrain.report.samples import STEP_BYTES, Sample, record_of, sample_of
from retrain.report.step_offsets import last_step, lines_of
from retrain.report.text import Excerpt, plain

AT_A_TIME = 12
SHOWN = ("all", "right", "wrong", "not trained")


def newest_step(file: Path) -> int | None:
    """The last step with completions; None if there is none yet."""
    try:
        with open_regular(file) as stream:
            return last_step(stream)
    except OSError:
        return None


def completions(file: Path, step: int, *, first: int, shown: str, correct_above: float) -> dict[str, Any]:
    """Completions `first` and following of a step, of those `shown`: all, right, wrong or not trained.

    `items` are their texts and numbers, `count` how many there are, and `is_cut` whether the step is larger than read.
    """
    items: list[dict[str, Any]] = []
    count = size = 0
    try:
        with open_regular(file) as stream:
            for offset, line in lines_of(stream, step, most_bytes=STEP_BYTES):
                size += len(line)
                record = record_of(line)
                if record is None or not _is_shown(
                    sample := sample_of(record, kind="", offset=offset), shown, correct_above
                ):
                    continue
                if first <= count < first + AT_A_TIME:
                    items.append(_item(sample, correct_above))
                count += 1
    except OSError:  # removed meanwhile
        return {"step": step, "first": first, "count": 0, "items": [], "is_cut": False}
    return {"step": step, "first": first, "count": count, "items": items, "is_cut": size > STEP_BYTES}


def _is_shown(sample: Sample, shown: str, correct_above: float) -> bool:
    if shown == "not trained":
        return not sample.trained
    return shown == "all" or (sample.reward is not None and (sample.reward > correct_above) == (shown == "right"))


def _item(sample: Sample, correct_above: float) -> dict[str, Any]:
    texts = {name: _excerpt(getattr(sample, name)) for name in ("prompt", "completion", "reference", "detail")}
    names = {name: plain(getattr(sample, name)) for name in ("group", "index", "example_id", "outcome", "stop_reason")}
    return {
        **texts,
        **names,
        "reward": sample.reward,
        "is_right": None if sample.reward is None else sample.reward > correct_above,
        "num_tokens": sample.num_tokens,
        "trained": sample.trained,
        "parts": {plain(name): value for name, value in sample.parts.items()},
    }


def _excerpt(value: Excerpt) -> dict[str, Any]:
    head, tail = (plain(part, len(part), kept="\n\t") for part in (value.head, value.tail))
    return {"head": head, "tail": tail, "left_out": value.left_out}
