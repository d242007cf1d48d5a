"""Helpers of a call from Python: values as flags, and a process that is left unchanged."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from types import FrameType
from typing import Any

from retrain.kernel.config.toml_file import toml_text
from retrain.kernel.errors import ConfigError, Problem, RetrainError
from retrain.text.secrets import hide_text
from retrain.text.terminal_text import printable

ROWS = "a list of dicts, a pandas or polars DataFrame, a datasets.Dataset, or a path"
MISSING = ("NAType", "NaTType")  # of pandas


def arguments_of(overrides: Mapping[str, Any]) -> list[str]:
    """Return keywords as flags: `lr=1e-4` is `--lr=0.0001`."""
    given = {name.replace("_", "-"): plain(value) for name, value in overrides.items()}
    return [f"--{name}={each if isinstance(each, str) else toml_text(each)}" for name, each in given.items()]


def plain(value: Any) -> Any:
    """Return a value as TOML has it: paths become texts, tuples lists, NumPy's numbers numbers."""
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0 else value


@contextmanager
def briefly_told() -> Iterator[None]:
    """Let a notebook show only the text of our errors, as a terminal does, without the stack of calls.

    A notebook keeps its last error: the frames of the run, with the model in them, must not live as long.
    """
    try:
        yield
    except (RetrainError, KeyboardInterrupt) as error:
        each: BaseException | None = error
        while each is not None:
            traceback.clear_frames(each.__traceback__)
            each = each.__cause__ or each.__context__
        if isinstance(error, RetrainError):
            lines = hide_text(f"retrain: {error.label}\n{error}").split("\n")
            error.__dict__["_render_traceback_"] = lambda: list(map(printable, lines))  # for IPython
        raise


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Delay an interrupt to the end of the block: half an imported library would break the process for good."""
    if threading.current_thread() is not threading.main_thread():
        yield  # where no signal arrives
        return
    came: list[FrameType | None] = []
    before = signal.signal(signal.SIGINT, lambda _, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(signal.SIGINT, came[0])


@contextmanager
def restored_imports() -> Iterator[None]:
    """Restore the import path after a run, and forget the modules that were copied for it."""
    path, modules = list(sys.path), set(sys.modules)
    try:
        yield
    finally:
        added = [folder for folder in sys.path if folder not in path]
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if os.path.dirname(file) in added:
                del sys.modules[name]


def data_file(data: Any, folder: Path, argument: str) -> str:
    """Return the path `data`, or write its rows to `<folder>/<hash>/data.jsonl` and return that.

    `argument` names it in messages. ConfigError for data without rows, or of another form.
    """
    if isinstance(data, str | os.PathLike):
        return str(os.fspath(data))
    lines = [json.dumps(row, ensure_ascii=True) for row in rows_of(data, argument)]
    if not lines:
        raise ConfigError(Problem(code="data.no-rows", where=argument, what="has no rows", fix="give one task per row"))
    text = "\n".join(lines) + "\n"
    # The path is part of a run's configuration: equal rows must have an equal path, or a resume would be refused.
    file = folder.absolute() / blake2b(text.encode(), digest_size=8).hexdigest() / "data.jsonl"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(text, encoding="utf-8")
        # Renamed when complete: another process may train on the same rows at this moment.
        partial.replace(file)
    return str(file)


def rows_of(data: Any, argument: str) -> list[dict[str, Any]]:
    """Return the rows as plain JSON values: missing ones None, integers without `.0`, arrays lists, dates texts."""
    rows = []
    for number, row in enumerate(_rows(data, argument)):
        if not isinstance(row, Mapping):
            what, fix = f"must be a dict, not {type(row).__name__}", 'write {"prompt": ..., "answer": ...}'
            raise ConfigError(Problem(code="data.row-not-dict", where=f"{argument}[{number}]", what=what, fix=fix))
        rows.append({str(name): _plain(value) for name, value in row.items()})
    return rows


def _rows(data: Any, argument: str) -> Iterable[Any]:
    if isinstance(data, Mapping):
        what = f"a {type(data).__name__} of {', '.join(map(str, list(data)[:8])) or 'nothing'} is not a list of rows"
        fix = f'choose one of its splits, data["train"], or give {ROWS}'
        raise ConfigError(Problem(code="data.no-split", where=argument, what=what, fix=fix))
    if hasattr(data, "collect_schema") and hasattr(data, "collect"):  # a polars LazyFrame
        data = data.collect()
    if hasattr(data, "to_dicts"):  # polars
        return list(data.to_dicts())
    if hasattr(data, "convert_dtypes") and hasattr(data, "columns"):  # pandas
        if not data.columns.is_unique:
            what, fix = "has two columns with the same name", "rename one of the columns"
            raise ConfigError(Problem(code="data.column-twice", where=argument, what=what, fix=fix))
        return list(data.convert_dtypes().to_dict("records"))  # with a missing value, integers would be floats
    if isinstance(data, bytes) or not isinstance(data, Iterable):
        what = f"a {type(data).__name__} holds no rows"
        raise ConfigError(Problem(code="data.not-rows", where=argument, what=what, fix=f"give {ROWS}"))
    return data


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "tolist"):  # NumPy
        return _plain(value.tolist())
    if type(value).__name__ in MISSING or (isinstance(value, float) and math.isnan(value)):
        return None
    return value if value is None or isinstance(value, str | int | float) else str(value)
