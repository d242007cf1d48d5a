"""Readers for the files of a run: errors name file and line; a last line that a kill truncated is skipped."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, TypeVar

from retrain.kernel.config.toml_file import open_regular, parse_toml
from retrain.kernel.errors import ConfigError, Problem

# A line of metrics.jsonl has about 2 KiB, so one block mostly holds the last line.
BLOCK_BYTES = 8192
TIMED = "_time_s"  # how fields of metrics.jsonl end that no two runs share
Record = Mapping[str, Any]
T = TypeVar("T")


def read_regular(file: Path) -> bytes:
    """Return the content of a file; OSError for a pipe, socket or device: they could block forever."""
    with open_regular(file) as stream:
        return stream.read()


def read_object(file: Path) -> Record:
    """Return the object in a JSON file; ConfigError with file and line if it cannot be read."""
    try:
        return parse_record(read_regular(file))
    except json.JSONDecodeError as error:
        raise damaged(f"{file}:{error.lineno}", error.msg) from error
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(file, error) from error


def read_if_any(file: Path) -> Record:
    """Return the object in a JSON file; empty if it cannot be read."""
    try:
        return read_object(file)
    except ConfigError:
        return {}


def read_toml(file: Path) -> Record:
    """Return the tables of a TOML file; ConfigError with file and line if it cannot be read."""
    try:
        return parse_toml(read_regular(file).decode("utf-8"), str(file))
    except ConfigError as error:
        problem = error.problems[0]
        raise damaged(problem.where, problem.what, problem.why) from error
    except (OSError, ValueError) as error:
        raise damaged(str(file), _reason(error)) from error


def parsed_lines(file: Path, parse: Callable[[bytes], T]) -> Iterator[tuple[int, T]]:
    """Yield line number and `parse(line)` of each line of a JSONL file that is not blank.

    ConfigError names the first line on which `parse` raises ValueError or RecursionError. A truncated last line is
    skipped.
    """
    try:
        with open_regular(file) as stream:
            for number, line in enumerate(stream, start=1):
                if line.isspace():
                    continue
                try:
                    value = parse(line)
                except (ValueError, RecursionError) as error:
                    # A line without its end was being written when the run was killed, or is being written now.
                    if line.endswith(b"\n"):
                        raise damaged(f"{file}:{number}", _reason(error)) from error
                    return
                yield number, value
    except OSError as error:
        raise _unreadable(file, error) from error


def read_records(file: Path) -> Iterator[tuple[int, Record]]:
    return parsed_lines(file, parse_record)


def read_steps(file: Path) -> Iterator[tuple[int, Record]]:
    """Yield step and record of each line of a JSONL file; ConfigError when a line has no step, or an earlier one."""
    before: int | None = None
    for number, record in read_records(file):
        step = record.get("step")
        if type(step) is not int:
            raise damaged(f"{file}:{number}", "the line has no step")
        if before is not None and step < before:
            raise damaged(f"{file}:{number}", f"step {step} comes after step {before}")
        before = step
        yield step, record


def last_record(file: Path, *, skip_damaged: bool = False, field: str = "") -> Record | None:
    """Return the last complete record of a JSONL file, or the last with `field`, from its end; None without one."""
    mark = f'"{field}"'.encode() if field else b""  # most lines need no parsing
    try:
        with open_regular(file) as stream:
            for number, line in enumerate(lines_backwards(stream)):
                try:
                    if line.strip() and mark in line and (field in (record := parse_record(line)) or not field):
                        return record
                except (ValueError, RecursionError) as error:
                    # Line 0, after the last line break, is empty or truncated by a kill.
                    if number > 0 and not skip_damaged:
                        raise damaged(f"{file} (last line)", _reason(error)) from error
    except FileNotFoundError:
        return None
    except OSError as error:
        raise damaged(str(file), _reason(error)) from error
    return None


def parse_record(line: bytes, *, allow_nan: bool = False, allow_overflow: bool = False) -> Record:
    """Return the JSON object of a line; ValueError for anything else, by default also for NaN, Infinity and 1e999."""
    constant, float_ = None if allow_nan else _refuse, None if allow_overflow else _finite
    record = json.loads(line.decode("utf-8"), parse_constant=constant, parse_float=float_)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


def number(value: object) -> float | None:
    """Return the value if it is a finite number, otherwise None."""
    try:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return None
    return value if is_number else None  # type: ignore[return-value]


def table_of(record: Record, *names: str) -> Mapping[str, Any]:
    """Return a table within a record, as `table_of(manifest, "config", "training")`; empty if it does not exist."""
    found: Any = record
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def text(value: object) -> str:
    return value if isinstance(value, str) else ""


def tables_in(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def integers_in(value: object) -> tuple[int, ...]:
    return tuple(each for each in value if type(each) is int) if isinstance(value, list) else ()


def flattened(tables: Record, prefix: str = "") -> dict[str, Any]:
    """Return the values of tables by dotted path; an empty table adds nothing."""
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def time_now() -> str:
    """Return the present time as records have it: ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def time_of(value: object) -> datetime | None:
    """Return the time that an ISO text with an offset names; None for anything else."""
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else None
        if found is not None:
            found.astimezone(UTC)  # beyond the calendar it raises
    except (ValueError, OverflowError, OSError):
        return None
    return found if found and found.tzinfo else None


def damaged(where: str, reason: str, excerpt: str = "") -> ConfigError:
    what, fix = f"cannot be read: {reason}", "give the log_dir of a run, or restore the file"
    return ConfigError(Problem(code="record.unreadable", where=where, what=what, why=excerpt, fix=fix))


def lines_backwards(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file from its end, without line breaks; the first comes after the last line break."""
    position, head = stream.seek(0, os.SEEK_END), b""
    while position:
        size = min(BLOCK_BYTES, position)
        position -= size
        stream.seek(position)
        head, *lines = (stream.read(size) + head).split(b"\n")
        yield from reversed(lines)
    yield head


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)


def _reason(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _unreadable(file: Path, error: BaseException) -> ConfigError:
    """Return the error for a file that cannot be opened; for a campaign given as a run it names one of its runs."""
    # only for an absent file: glob itself raises for a name that is too long
    is_absent = isinstance(error, FileNotFoundError)
    runs = sorted(path for path in file.parent.glob("runs/*") if (path / file.name).is_file()) if is_absent else []
    if runs:
        what = f"this is a campaign of {len(runs)} run{'s' if len(runs) > 1 else ''}, not a run"
        fix = f"give one of them, for example {runs[0]}"
        return ConfigError(Problem(code="run.is-campaign", where=str(file.parent), what=what, fix=fix))
    return damaged(str(file), _reason(error))
