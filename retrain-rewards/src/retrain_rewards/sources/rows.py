"""Reads JSONL, JSON, CSV and Parquet files and data sets of the hub row by row, and reports where a faulty row is.

CSV and Parquet are read through `datasets` in streaming mode: no copy in its cache, no progress bars, constant memory.
JSON is read here, because the reader of `datasets` guesses types ("2024-01-01" becomes a time, 7 next to 8.5 becomes
7.0) and loses line numbers, and because a run on a JSONL file then need not wait for its import. CSV columns are read
as text for the first of these reasons ("007" stays "007").
"""

from __future__ import annotations

import csv
import glob
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.api import ConfigError
from retrain_rewards.faults import refused

JSON_LINES = (".jsonl", ".ndjson")
SUFFIXES = (*JSON_LINES, ".json", ".csv", ".parquet")
# A byte-order mark is not part of the first column's name.
ENCODING = "utf-8-sig"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row and where it was read: `tasks.jsonl:12`, `tasks.csv row 12` (the first after the header is 1)."""

    place: str
    values: Mapping[str, Any]


def read_rows(file: Path) -> Iterator[Row]:
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        what, fix = f"the suffix {suffix!r} is not a known format", f"use one of: {', '.join(SUFFIXES)}"
        raise refused(str(file), code="data.unknown-format", what=what, fix=fix)
    try:
        if file.stat().st_size == 0:
            return
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        raise refused(str(file), code="data.unreadable-path", what=what, fix="check the path") from None
    if suffix in (".parquet", ".csv"):
        yield from numbered(str(file), _csv(file) if suffix == ".csv" else _stream("parquet", file))
    else:
        yield from _json_document(file) if suffix == ".json" else _json_lines(file)


def numbered(name: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    return (Row(place=f"{name} row {number}", values=values) for number, values in enumerate(rows, start=1))


def _stream(builder: str, file: Path, **settings: Any) -> Iterator[dict[str, Any]]:
    import datasets

    logging = datasets.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # the error below reports it once, in full
    try:
        # `datasets` takes a path for a pattern, so brackets in a folder's name would match nothing.
        files = {"train": [glob.escape(str(file.resolve()))]}
        # The default cache need not exist, nor be writable.
        with tempfile.TemporaryDirectory() as locks:
            settings |= {"cache_dir": locks, "streaming": True}
            yield from datasets.load_dataset(builder, data_files=files, split="train", **settings)
    except Exception as error:  # pyarrow, pandas, datasets and the codecs each raise their own
        what = f"cannot be read as {builder}: {type(error).__name__}: {' '.join(str(error).split())}"
        fix = "repair the file, or write it again"
        raise refused(str(file), code="data.unreadable-table", what=what, fix=fix) from error
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def _as_text(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot be read as text: {type(error).__name__}: {error}"
        fix = "repair the file, or write it again as UTF-8"
        raise refused(str(file), code="data.not-text", what=what, fix=fix) from None


def _csv(file: Path) -> Iterator[dict[str, Any]]:
    import datasets

    try:
        with file.open(encoding=ENCODING, newline="") as lines:
            header = next((record for record in csv.reader(lines, strict=True) if any(record)), [])
    except (UnicodeDecodeError, csv.Error) as error:
        what, fix = f"the header cannot be read: {error}", "write the file as UTF-8 CSV"
        raise refused(f"{file}:1", code="data.bad-header", what=what, fix=fix) from None
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        what = f"there are two columns {twice[0]!r}"
        raise refused(f"{file}:1", code="data.column-twice", what=what, fix="rename one of the columns")
    # A single column with another separator in its name: the file is not comma-separated.
    if len(header) == 1 and (found := next((mark for mark in ";\t|" if mark in header[0]), "")):
        what = f"columns are separated by {found!r}"
        raise refused(f"{file}:1", code="data.wrong-separator", what=what, fix="separate them with commas")
    if header:
        features = datasets.Features({name: datasets.Value("string") for name in header})
        yield from _stream("csv", file, features=features, encoding=ENCODING, keep_default_na=False, index_col=False)


def _json_lines(file: Path) -> Iterator[Row]:
    with _as_text(file), file.open(encoding=ENCODING) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                place = f"{file}:{number}"
                yield Row(place=place, values=_object(_parsed(line.rstrip("\n"), place), place))


def _json_document(file: Path) -> Iterator[Row]:
    with _as_text(file):
        document = file.read_text(encoding=ENCODING)
    try:
        content = _parsed(document, str(file), is_document=True)
    except ConfigError as error:
        if not (isinstance(error.__cause__, json.JSONDecodeError) and error.__cause__.msg == "Extra data"):
            raise
        yield from _json_lines(file)
        return
    for number, values in enumerate(content if isinstance(content, list) else [content], start=1):
        place = f"{file} row {number}"
        yield Row(place=place, values=_object(values, place))


def _parsed(text: str, place: str, *, is_document: bool = False) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{place}:{error.lineno}" if is_document else place
        what = f"not JSON: {error.msg} at column {error.colno}"
        raise refused(where, code="data.bad-json", what=what, fix="correct that line") from error
    except (ValueError, RecursionError) as error:
        what, fix = f"not usable JSON: {error}", "correct that value"
        raise refused(place, code="data.bad-json", what=what, fix=fix) from error


def _object(values: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(values, dict):
        what = f"must be a JSON object, not {type(values).__name__}"
        raise refused(place, code="data.row-not-object", what=what, fix='write {"prompt": ..., "answer": ...}')
    return values


PROBE_TIMEOUT_S = 5.0
COPY = "a folder with a file or sub-folder per subject"


def hub_rows(
    name: str, subset: str, split: str, *, where: str, revision: str = "", copy: str = COPY
) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of one subset and split. ConfigError when it is neither reachable nor cached, within seconds.

    An empty subset is the data set's own default, an empty revision its newest; `copy` describes a local copy. By
    itself `datasets` retries an unreachable hub for half a minute per subset. So one request comes first, and if the
    hub does not answer it, only the cache is used.
    """
    import datasets

    reachable, was_offline = _reachable(), datasets.config.HF_HUB_OFFLINE
    try:
        # The library reads this flag at each call. Offline it takes its cache at once, without retries.
        datasets.config.HF_HUB_OFFLINE = not reachable
        data = datasets.load_dataset(name, subset or None, split=split, revision=revision or None)
    except Exception as error:  # network, hub, cache and file errors alike: each its own class
        reason = " ".join(str(error).split())
        which = ", ".join(filter(None, (subset, f"split {split}", revision)))
        fault = f"no answer from {datasets.config.HF_ENDPOINT}"
        if was_offline:
            fault = "offline mode is set (HF_HUB_OFFLINE)"
        what = f"data set {name} ({which}) cannot be loaded"
        why = f"{type(error).__name__}: {reason}" if reachable else f"{fault}, and not in the cache"
        fix = f"connect once, or set [data] path to a local copy: {copy}"
        raise refused(where, code="data.hub-unavailable", what=what, why=why, fix=fix) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline
    yield from data


def saved_rows(folder: Path, split: str, *, where: str) -> Iterator[Mapping[str, Any]]:
    import datasets

    try:
        data = datasets.load_from_disk(str(folder))
    except Exception as error:  # pyarrow and datasets each raise their own
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        what, fix = f"{str(folder)!r} cannot be read as a saved data set", "write it again with save_to_disk"
        raise refused(where, code="data.bad-saved-data-set", what=what, why=reason, fix=fix) from error
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            fix = f'[data] options = {{ split = "{next(iter(data), "NAME")}" }}'
            what = f"{str(folder)!r} has no split {split!r}"
            raise refused(where, code="data.unknown-split", what=what, why=f"found: {', '.join(data)}", fix=fix)
        data = data[split]
    yield from data


def is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _reachable() -> bool:
    import datasets
    import huggingface_hub

    if datasets.config.HF_HUB_OFFLINE:
        return False
    try:
        huggingface_hub.get_session().head(datasets.config.HF_ENDPOINT, timeout=PROBE_TIMEOUT_S)
    except Exception:  # the HTTP library's own class: it depends on the version of huggingface_hub
        return False
    return True
