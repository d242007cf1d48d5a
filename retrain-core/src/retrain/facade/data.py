"""Rows as Python programs hold them, as the file of JSON lines that a configuration can name."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from retrain.kernel.errors import ConfigError, Problem

ROWS = "a list of dicts, a pandas or polars DataFrame, a datasets.Dataset, or a path"
MISSING = ("NAType", "NaTType")  # of pandas


def data_file(data: Any, folder: Path, argument: str) -> str:
    """The path that `data` is, or that of `<folder>/<hash>/data.jsonl`, to which its rows are written.

    `argument` names it in messages. ConfigError for data without rows, or of another form.
    """
    if isinstance(data, str | os.PathLike):
        return str(os.fspath(data))
    lines = [json.dumps(row, ensure_ascii=True) for row in rows_of(data, argument)]
    if not lines:
        raise _refused(argument, "has no rows", "give one task per row")
    text = "\n".join(lines) + "\n"
    file = folder.absolute() / blake2b(text.encode(), digest_size=8).hexdigest() / "data.jsonl"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    return str(file)


def rows_of(data: Any, argument: str) -> list[dict[str, Any]]:
    """The rows as plain JSON values: missing ones None, integers without `.0`, arrays lists, dates texts."""
    return [_row(row, f"{argument}[{number}]") for number, row in enumerate(_rows(data, argument))]


def _rows(data: Any, argument: str) -> Iterable[Any]:
    if isinstance(data, Mapping):
        what = f"a {type(data).__name__} of {', '.join(map(str, list(data)[:8])) or 'nothing'} is no list of rows"
        raise _refused(argument, what, f'choose one of its splits, data["train"], or give {ROWS}')
    if hasattr(data, "collect_schema") and hasattr(data, "collect"):  # a polars LazyFrame
        data = data.collect()
    if hasattr(data, "to_dicts"):  # polars
        return list(data.to_dicts())
    if hasattr(data, "convert_dtypes") and hasattr(data, "columns"):  # pandas
        if not data.columns.is_unique:
            raise _refused(argument, "has two columns of one name", "rename one")
        return list(data.convert_dtypes().to_dict("records"))  # with a missing value, integers would be floats
    if isinstance(data, bytes) or not isinstance(data, Iterable):
        raise _refused(argument, f"a {type(data).__name__} holds no rows", f"give {ROWS}")
    return data


def _row(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise _refused(where, f"must be a dict, not {type(row).__name__}", 'write {"prompt": ..., "answer": ...}')
    return {str(name): _plain(value) for name, value in row.items()}


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


def _refused(where: str, what: str, fix: str) -> ConfigError:
    return ConfigError(Problem(where=where, what=what, fix=fix))
