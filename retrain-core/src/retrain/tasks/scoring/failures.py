"""Failed scores: their repair, their budget, and files with the texts, so that they can be scored again."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.config.toml_file import open_regular
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import Example
from retrain.records.files import write_bytes
from retrain.tasks.child import wire
from retrain.tasks.scoring.pool import NamedReward, Task
from retrain.text.secrets import hide_text, redacted

LOG = logging.getLogger("retrain")
FOLDER = "failures"
MAX_FILES = 1000
MAX_REPR = 10_000
_NEXT_STEPS = {  # part of a detail -> what to do about it
    "timed out": "make the reward faster, or raise [scoring.limits.{name}] timeout_s",
    "took longer than": "raise [scoring.limits.{name}] timeout_s",
    "returned None": "return a number, or Score.no_verdict(reason) where it cannot decide",
    "finite number": "return a finite number: look for a division by zero, a logarithm of 0 or the mean of nothing",
    "not a number": "return a number or a Score",
    "empty reference": "give that example a reference answer, or remove its row",
    "the reference": "rewrite the reference of that example, or remove its row",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """A score that failed on every attempt.

    `weight` is the reward's; `attempts` counts the tries, and the last one took `seconds`; `count` equal completions
    share the record; `report` is a traceback, or the output of the scoring process.
    """

    reward: str
    weight: float
    example: Example
    text: str
    detail: str
    attempts: int
    seconds: float
    count: int = 1
    report: str = ""


OF_EXAMPLE = ("id", "prompt", "reference", "task", "info")
OF_SCORE = tuple(name for name in FailureRecord.__slots__ if name not in ("example", "text"))


def next_step(detail: str, name: str = "NAME") -> str:
    """Return the repair for the detail of a score of reward `name` that failed or has no verdict; empty if unknown."""
    return next((step.format(name=name) for cause, step in _NEXT_STEPS.items() if cause in detail), "")


def records_of(failed: Mapping[Task, int], rewards: Sequence[NamedReward]) -> list[FailureRecord]:
    return [
        FailureRecord(
            reward=rewards[task.reward].name,
            weight=rewards[task.reward].weight,
            example=task.example,
            text=task.text,
            detail=task.score.detail,
            attempts=task.attempts,
            seconds=task.last.seconds,
            count=count,
            report=task.last.report,
        )
        for task, count in failed.items()
    ]


def over_budget(name: str, limits: ScoringTable, failed: Sequence[Task], *, total: int, kept: Path | None) -> Problem:
    """Return the problem with a reward that failed on too many of `total` texts; `kept` is the folder of the texts."""
    first = failed[0].score.detail
    what = f"reward {name!r} failed on {len(failed)} of {total} completions"
    what += f"; first: {first}, on example {failed[0].example.id}"
    why = f"more than max_failed_frac = {limits.max_failed_frac:g} of them"
    fix = next_step(first, name) or "repair the reward or its data"
    if kept:
        why += f"; the texts are in {kept}"
        fix += f" (`retrain audit --replay {kept}` scores them again)"
    fix = f"{fix}, or raise [scoring] max_failed_frac"
    return Problem(code="reward.too-many-failures", where="scoring", what=what, why=why, fix=fix)


def write_failures(folder: Path, label: str, records: Sequence[FailureRecord]) -> bool:
    """Write `<folder>/<label>_<n>.json` in place of an earlier attempt's; False without room for all of them."""
    label = re.sub(r"[^\w.-]", "_", label) or "scores"
    try:
        of_label = re.compile(rf"{re.escape(label)}_\d+\.json")
        for file in folder.iterdir() if folder.is_dir() else ():
            if of_label.fullmatch(file.name):
                file.unlink()
        room = MAX_FILES - sum(1 for _ in folder.glob("*.json"))
        for number, record in enumerate(records[:room]):
            folder.mkdir(parents=True, exist_ok=True)
            own = {name: getattr(record, name) for name in OF_SCORE}
            own |= {"detail": hide_text(record.detail), "report": hide_text(record.report)}  # they may quote a key
            example = {name: _sendable(getattr(record.example, name)) for name in OF_EXAMPLE}
            text = json.dumps(redacted({**own, "example": example, "text": record.text}), indent=2)
            # escapes, for a text may hold lone surrogates
            write_bytes(folder / f"{label}_{number}.json", text.encode("ascii") + b"\n")
    except OSError as error:
        LOG.warning("Failed scores cannot be kept in %s: %s", folder, error.strerror or error)
        return True
    return len(records) <= room


def read_failures(path: Path) -> list[tuple[Path, FailureRecord]]:
    """Return the record of a file, or all of a folder in order; ConfigError names a file that is not a record."""
    if not path.exists():
        fix = "give a file or folder of failed scores"
        raise ConfigError(Problem(code="replay.missing", where=str(path), what="does not exist", fix=fix))
    files = sorted(path.glob("*.json"), key=_order) if path.is_dir() else [path]
    if not files:
        what, fix = "no failed scores in this folder", "give the folder failures/ of a run"
        raise ConfigError(Problem(code="replay.empty-folder", where=str(path), what=what, fix=fix))
    records = []
    for file in files:
        try:
            with open_regular(file) as stream:
                content = json.load(stream)
            example = Example(**{name: wire.decode(content["example"][name]) for name in OF_EXAMPLE})
            record = FailureRecord(example=example, text=content["text"], **{name: content[name] for name in OF_SCORE})
            if not isinstance(record.text, str):
                raise TypeError("text must be text")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = f"is not a record of a failed score: {type(error).__name__}: {error}"
            fix = "give a file that a run wrote"
            raise ConfigError(Problem(code="replay.unreadable", where=str(file), what=what, fix=fix)) from error
        records.append((file, record))
    return records


def _sendable(part: Any) -> Any:
    try:
        return wire.encode(part)
    except (TypeError, RecursionError):  # perhaps the reason why it failed
        if isinstance(part, Mapping):
            return {str(name): _sendable(each) for name, each in part.items()}
        return repr(part)[:MAX_REPR]


def _order(file: Path) -> list[Any]:
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", file.name)]
