"""Files with the texts on which a reward failed, one each, so that they can be scored again."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.kernel.config.toml_file import open_regular
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import Example
from retrain.records.files import write_bytes
from retrain.tasks.child import wire
from retrain.text.secrets import hide_text, redacted

LOG = logging.getLogger("retrain")
FOLDER = "failures"
MAX_FILES = 1000
MAX_REPR = 10_000


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


def write_failures(folder: Path, label: str, records: Sequence[FailureRecord]) -> bool:
    """Write `<folder>/<label>_<n>.json`, replacing the files of an earlier attempt with the same label.

    A folder holds at most `MAX_FILES`: False when there was no room for all. An error of the disk is logged, and stops
    nothing.
    """
    label = re.sub(r"[^\w.-]", "_", label) or "scores"
    try:
        for old in _of_label(folder, label):
            old.unlink()
        room = MAX_FILES - sum(1 for _ in folder.glob("*.json"))
        for number, record in enumerate(records[:room]):
            folder.mkdir(parents=True, exist_ok=True)
            write_bytes(folder / f"{label}_{number}.json", _as_json(record))
    except OSError as error:
        LOG.warning("Failed scores cannot be kept in %s: %s", folder, error.strerror or error)
        return True
    return len(records) <= room


def read_failures(path: Path) -> list[tuple[Path, FailureRecord]]:
    """The record of a file, or all of a folder in order; ConfigError names a file that is not a record."""
    if not path.exists():
        raise ConfigError(Problem(where=str(path), what="does not exist", fix="give a file or folder of failed scores"))
    files = sorted(path.glob("*.json"), key=_order) if path.is_dir() else [path]
    if not files:
        raise ConfigError(Problem(where=str(path), what="no failed scores in this folder", fix="give another"))
    return [(file, _read(file)) for file in files]


def _read(file: Path) -> FailureRecord:
    try:
        with open_regular(file) as stream:
            content = json.load(stream)
        example = Example(**{name: wire.decode(content["example"][name]) for name in OF_EXAMPLE})
        record = FailureRecord(example=example, text=content["text"], **{name: content[name] for name in OF_SCORE})
        if not isinstance(record.text, str):
            raise TypeError("text must be text")
        return record
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"is not a record of a failed score: {type(error).__name__}: {error}"
        raise ConfigError(Problem(where=str(file), what=what, fix="give a file that a run wrote")) from error


def _as_json(record: FailureRecord) -> bytes:
    own = {name: getattr(record, name) for name in OF_SCORE}
    own |= {"detail": hide_text(record.detail), "report": hide_text(record.report)}  # an exception may quote a key
    example = {name: _sendable(getattr(record.example, name)) for name in OF_EXAMPLE}
    text = json.dumps(redacted({**own, "example": example, "text": record.text}), indent=2)
    return text.encode("ascii") + b"\n"  # escapes, for a text may hold lone surrogates


def _sendable(part: Any) -> Any:
    try:
        return wire.encode(part)
    except (TypeError, RecursionError):  # perhaps the reason why it failed
        if isinstance(part, Mapping):
            return {str(name): _sendable(each) for name, each in part.items()}
        return repr(part)[:MAX_REPR]


def _of_label(folder: Path, label: str) -> list[Path]:
    pattern = re.compile(rf"{re.escape(label)}_\d+\.json")
    with suppress(FileNotFoundError, NotADirectoryError):
        return [file for file in folder.iterdir() if pattern.fullmatch(file.name)]
    return []


def _order(file: Path) -> list[Any]:
    """`step_10_2.json` after `step_9_11.json`."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", file.name)]
