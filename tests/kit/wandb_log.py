"""Reads the file that wandb writes while it is offline."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK, FILE_HEADER, RECORD_HEADER = 32768, 7, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass(slots=True)
class WandbRun:
    """An offline run as wandb would upload it; `rows` are by step, `proto` is the record of its name and project."""

    proto: Any = None
    config: dict[str, Any] = field(default_factory=dict)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    artifacts: list[tuple[str, str, tuple[str, ...]]] = field(default_factory=list)
    exit_code: int | None = None


def read_runs(folder: Path) -> list[WandbRun]:
    """Return the sessions below a folder that hold a record, oldest first."""
    from wandb.proto.wandb_internal_pb2 import Record

    runs = []
    for file in sorted(folder.glob("wandb/*run-*/run-*.wandb")):
        run = WandbRun()
        for content in transactions(file.read_bytes()):
            record = Record()
            record.ParseFromString(content)
            _add(run, record)
        runs += [run] if run.proto else []
    return runs


def _add(run: WandbRun, record: Any) -> None:
    kind = record.WhichOneof("record_type")
    if kind == "run":
        run.proto = record.run
        run.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    elif kind == "history":
        row = _values(record.history.item)
        run.rows[row["_step"]] = {name: value for name, value in row.items() if not name.startswith("_")}
    elif kind == "summary":
        run.summary |= _values(record.summary.update)
    elif kind == "artifact":
        artifact = record.artifact
        files = tuple(sorted(Path(entry.path).name for entry in artifact.manifest.contents))
        run.artifacts.append((artifact.name, " ".join(sorted(artifact.aliases)), files))
    elif kind == "exit":
        run.exit_code = record.exit.exit_code


def _values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def transactions(content: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log (github.com/google/leveldb/blob/main/doc/log_format.md) behind wandb's header."""
    if not content:  # of a session that never began
        return
    assert content[:4] == b":W&B"
    at, parts = FILE_HEADER, b""
    while at + RECORD_HEADER <= len(content):
        left = BLOCK - at % BLOCK
        if left < RECORD_HEADER:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        body = content[at + RECORD_HEADER : at + RECORD_HEADER + length]
        at += RECORD_HEADER + length
        parts = body if kind in (FULL, FIRST) else parts + body
        if kind in (FULL, LAST):
            yield parts
