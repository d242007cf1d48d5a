"""The files of a run, read back by someone who was not there: damage is named, a line cut by a kill is not damage."""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from retrain.kernel.errors import ConfigError, Problem

BLOCK_BYTES = 8192
FIX = "give the log_dir of a run, or restore the file"
Record = Mapping[str, Any]


def read_object(file: Path) -> Record:
    """The object that a JSON file holds; ConfigError with file and line when there is none."""
    try:
        return _parse(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise _damaged(f"{file}:{error.lineno}", error.msg) from error
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(file, error) from error


def read_toml(file: Path) -> Record:
    """The tables of a TOML file; ConfigError with file and line when it cannot be read."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        line = re.search(r"at line (\d+)", str(error))
        raise _damaged(f"{file}:{line[1]}" if line else str(file), _reason(error)) from error


def read_records(file: Path) -> Iterator[tuple[int, Record]]:
    """Line number and record of each line of a JSONL file, streamed; ConfigError names the first damaged line.

    A last line that was cut short, as a kill in mid-write leaves it, is left out.
    """
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    if line.strip():
                        yield number, _parse(line.decode("utf-8"))
                except (ValueError, RecursionError) as error:
                    if line.endswith(b"\n"):
                        raise _damaged(f"{file}:{number}", _reason(error)) from error
    except OSError as error:
        raise _unreadable(file, error) from error


def read_steps(file: Path) -> Iterator[tuple[int, Record]]:
    """Step and record of each line of a JSONL file; ConfigError when a line has no step, or an earlier one."""
    before: int | None = None
    for number, record in read_records(file):
        step = record.get("step")
        if type(step) is not int:
            raise _damaged(f"{file}:{number}", "the line has no step")
        if before is not None and step < before:
            raise _damaged(f"{file}:{number}", f"step {step} comes after step {before}")
        before = step
        yield step, record


def last_record(file: Path) -> Record | None:
    """The last whole record of a JSONL file, found from its end; None when it has none.

    Time and memory do not grow with the file. ConfigError when the last whole line is damaged.
    """
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(_lines_backwards(stream)):
                try:
                    if line.strip():
                        return _parse(line.decode("utf-8"))
                except (ValueError, RecursionError) as error:
                    if number > 0:  # the first is what follows the last line break: nothing, or a line cut short
                        raise _damaged(f"{file} (last line)", _reason(error)) from error
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _damaged(str(file), _reason(error)) from error
    return None


def number(value: object) -> float | None:
    """A finite number as it is; anything else is no number."""
    try:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return None
    return value if is_number else None  # type: ignore[return-value]


def _lines_backwards(stream: BinaryIO) -> Iterator[bytes]:
    position, head = stream.seek(0, os.SEEK_END), b""
    while position:
        size = min(BLOCK_BYTES, position)
        position -= size
        stream.seek(position)
        head, *lines = (stream.read(size) + head).split(b"\n")
        yield from reversed(lines)
    yield head


def _parse(text: str) -> Record:
    record = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)


def _reason(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _unreadable(file: Path, error: BaseException) -> ConfigError:
    """What is wrong with the file; a campaign that was given in place of a run is met with one of its runs."""
    runs = sorted(path for path in file.parent.glob("runs/*") if (path / file.name).is_file())
    if isinstance(error, FileNotFoundError) and runs:
        what = f"this is a campaign of {len(runs)} run{'s' if len(runs) > 1 else ''}, not a run"
        return ConfigError(Problem(where=str(file.parent), what=what, fix=f"give one of them, for example {runs[0]}"))
    return _damaged(str(file), _reason(error))


def _damaged(where: str, reason: str) -> ConfigError:
    return ConfigError(Problem(where=where, what=f"cannot be read: {reason}", fix=FIX))
