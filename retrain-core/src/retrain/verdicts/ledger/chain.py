"""Appends events to `ledger.jsonl`, each with the hash of the one before, under a lock and flushed to disk.

A line is `{"time", "kind", ..., "previous", "sha256"}`: `sha256` is the hash of the line's bytes without itself,
`previous` the `sha256` of the line before, 64 zeros in the first. So an edited, dropped, added, repeated or moved line
is found; a missing tail only with a later hash. Secrets are left out as in all records.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from retrain.kernel.config.toml_file import open_regular
from retrain.kernel.errors import StopRequested
from retrain.records.files import append_whole, seal_of, take_lock
from retrain.records.reading import lines_backwards, table_of, time_now
from retrain.records.record_names import CAMPAIGN_FILE, EVALUATION, METRICS, RUNS, TUNING
from retrain.records.run import Run, settings_key
from retrain.text.secrets import hide, redacted_json

if TYPE_CHECKING:
    from retrain.kernel.contracts.views import RunView

LOG = logging.getLogger("retrain")
NAME = "ledger.jsonl"
FIRST = "0" * 64
# The lock is held for one write and one flush; a disk that takes longer must not stop a run.
PATIENCE_S = 5.0
# Written behind the canonical JSON, so that the hash covers bytes and not one of several ways to write a record.
SUFFIX = re.compile(rb', "sha256": "([0-9a-f]{64})"\}\n')
SUFFIX_BYTES = len(', "sha256": ""}\n') + 64
HASHED = (METRICS, EVALUATION)  # the final records of a run; eval.jsonl is only there if it was evaluated
# A run that is moved keeps its identity: these tables say only where it is.
OF_THE_PLACE = frozenset({"logging", "resume"})
# These tables measure or guard a run; they change nothing that it learns.
NOT_LEARNED = frozenset({"eval", "gaming", "scoring", "watchdog"})


def append(folder: Path, kind: str, **fields: Any) -> str:
    """Append an event to the ledger in `folder`; return why that failed, or nothing.

    `fields` are plain data. A last line that a kill tore is removed first, and the event records it (`healed`: bytes).
    """
    content = plain_data(hide(fields))
    try:
        with _locked(folder / NAME) as stream:
            backwards = lines_backwards(stream)
            torn, last = next(backwards), next(backwards, None)
            if torn:
                os.ftruncate(stream.fileno(), stream.seek(0, os.SEEK_END) - len(torn))
                content["healed"] = len(torn)
            previous = FIRST if last is None else hash_of_line(last + b"\n")
            record = {"time": time_now(), "kind": kind, **content, "previous": previous}
            body = redacted_json([record])[0].encode("utf-8", "backslashreplace")
            line = body[:-1] + f', "sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode("ascii")
            append_whole(stream.fileno(), line, sync=True)
    except OSError as error:
        return f"{folder / NAME} cannot be written: {error.strerror or error}"
    return ""


@contextmanager
def _locked(file: Path) -> Iterator[IO[bytes]]:
    """Open the ledger so that no other process writes to it meanwhile; OSError when that takes too long."""

    def opener(path: str, flags: int) -> int:
        # A FIFO without a reader would block.
        return os.open(path, flags | os.O_NONBLOCK, 0o666)

    with open(file, "a+b", buffering=0, opener=opener) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(f"{NAME} is not a regular file")
        if not take_lock(stream, PATIENCE_S):
            raise OSError("another process has held it for too long")
        yield stream


def hash_of_line(line: bytes) -> str:
    """Return the hash that a line states; without one, hash its bytes, so that the chain continues after damage."""
    found = SUFFIX.fullmatch(line[-SUFFIX_BYTES:])
    return found[1].decode("ascii") if found else hashlib.sha256(line).hexdigest()


def plain_data(value: Any) -> Any:
    """Return plain data, null for numbers that are not finite, dataclasses by their fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain_data(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain_data(each) for key, each in value.items()}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_data(each) for each in value]
    return value


def ledger_folder(path: Path) -> Path:
    """Return the folder that holds a run or a campaign, or the campaign of a run: its ledger covers them."""
    folder = path.resolve()
    is_of_campaign = folder.parent.name == RUNS and (folder.parent.parent / CAMPAIGN_FILE).is_file()
    own = folder.parent.parent if is_of_campaign else folder
    # Tuning runs are in the ledger of the campaign that they choose for.
    is_tuning = own.name == TUNING and (own.parent / CAMPAIGN_FILE).is_file()
    return own.parent.parent if is_tuning else own.parent


def name_in(folder: Path, path: Path) -> str:
    """Return a run's or campaign's folder relative to the ledger's, with slashes on every system."""
    full, base = path.resolve(), folder.resolve()
    return full.relative_to(base).as_posix() if full.is_relative_to(base) else str(full)


def record_hashes(run: Path) -> dict[str, str]:
    """Hash a run's final records; a file that is missing, or cannot be read, has no hash."""
    found = {}
    for name in HASHED:
        with suppress(OSError), open_regular(run / name) as stream:
            found[name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def manifest_hashes(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Hash the settings in `run.json`, and its code, data and plugins."""
    # Imported late, since `status` needs none of it.
    from retrain.records.identity.copies import input_digests

    settings = {name: keys for name, keys in table_of(manifest, "config").items() if name not in OF_THE_PLACE}
    hashes = {"settings": seal_of({"settings": settings})}
    if isinstance(identity := manifest.get("identity"), dict):
        hashes["inputs"] = seal_of({"inputs": input_digests(identity)})
    return hashes


def learned_by(manifest: Mapping[str, Any]) -> str:
    """Hash the settings in `run.json` that decide its learning, without seed and length."""
    settings = [each for each in settings_key(manifest) if each[0].partition(".")[0] not in NOT_LEARNED]
    return seal_of({"learns": settings})


def begin(run: RunView) -> None:
    is_resumed, learns = "resumed_at_step" in run.manifest, learned_by(Run(run.folder).record)
    if reason := _append(run, "run_started", {}, first_step=run.first_step, resumed=is_resumed, learns=learns):
        LOG.warning("Not in the ledger: %s. `retrain compare` will report the run as unknown", reason)


def end(run: RunView, error: BaseException | None) -> None:
    state = "done" if error is None else "stopped" if isinstance(error, StopRequested) else "failed"
    _append(run, "run_ended", record_hashes(run.folder), state=state, steps=Run(run.folder).num_steps)


def _append(run: RunView, kind: str, hashes: dict[str, str], **fields: Any) -> str:
    folder, hashes = ledger_folder(run.folder), hashes | manifest_hashes(Run(run.folder).record)
    fields = {"condition": run.condition, "seed": run.seed, **fields, "hashes": hashes}
    return append(folder, kind, run=name_in(folder, run.folder), started=str(run.manifest.get("started", "")), **fields)
