"""Appends events to `ledger.jsonl`, each with the hash of the one before, under a lock and flushed to disk.

A line is `{"time", "kind", ..., "previous", "sha256"}`: `sha256` is the hash of the line's bytes without itself,
`previous` the `sha256` of the line before, 64 zeros in the first. So an edited, dropped, added, repeated or moved line
is found; a missing tail only with a later hash. Secrets are left out as in all records.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import math
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.kernel.config.toml_file import open_regular
from retrain.kernel.errors import StopRequested
from retrain.records.files import seal_of
from retrain.records.reading import table_of
from retrain.records.record_names import CAMPAIGN_FILE, EVALUATION, METRICS
from retrain.records.run import Run, settings_key
from retrain.text.secrets import hide, redacted_json

if TYPE_CHECKING:
    from retrain.kernel.contracts.views import RunView

NAME = "ledger.jsonl"
FIRST = "0" * 64
BLOCK_BYTES = 8192
PATIENCE_S, PAUSE_S = 5.0, 0.01  # for the lock, which is held for one write and one flush
SUFFIX = re.compile(rb', "sha256": "([0-9a-f]{64})"\}\n')
SUFFIX_BYTES = len(', "sha256": ""}\n') + 64


def append(folder: Path, kind: str, **fields: Any) -> str:
    """Append an event to the ledger in `folder`; return why that failed, or nothing.

    `fields` are plain data. Only the end of the file is read. A last line that a kill tore is removed first, and the
    event records it (`healed`: bytes): it was never on record.
    """
    content = as_recorded(hide(fields))
    try:
        with _locked(folder / NAME) as descriptor:
            size = os.fstat(descriptor).st_size
            last = _last_line(descriptor, size)
            if last and not last.endswith(b"\n"):
                os.ftruncate(descriptor, size - len(last))
                content["healed"] = len(last)
                last = _last_line(descriptor, size - len(last))
            now = datetime.now(UTC).isoformat(timespec="seconds")
            record = {"time": now, "kind": kind, **content, "previous": hash_of_line(last)}
            body = redacted_json([record])[0].encode("utf-8", "backslashreplace")
            sha256 = hashlib.sha256(body).hexdigest()
            _write(descriptor, body[:-1] + f', "sha256": "{sha256}"}}\n'.encode("ascii"))
    except OSError as error:
        return f"{folder / NAME} cannot be written: {error.strerror or error}"
    return ""


def hash_of_line(line: bytes) -> str:
    """Return the hash that a line states; without one, that of its bytes, so that the chain continues after damage."""
    if not line:
        return FIRST
    found = SUFFIX.fullmatch(line[-SUFFIX_BYTES:])
    return found[1].decode("ascii") if found else hashlib.sha256(line).hexdigest()


def as_recorded(value: Any) -> Any:
    """Return plain data with null for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(name): as_recorded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_recorded(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _locked(file: Path) -> Iterator[int]:
    """Yield a descriptor of the ledger that no other process writes to meanwhile; OSError when that takes too long."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{NAME} is not a regular file")
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise OSError("another process has held it for too long") from None
                time.sleep(PAUSE_S)
        yield descriptor
    finally:
        os.close(descriptor)


def _last_line(descriptor: int, size: int) -> bytes:
    """Return the last line, whole or torn, of a file of `size` bytes, read from its end."""
    position, tail = size, b""
    while position:
        step = min(BLOCK_BYTES, position)
        position -= step
        tail = os.pread(descriptor, step, position) + tail
        start = tail.rfind(b"\n", 0, len(tail) - 1)
        if start >= 0:
            return tail[start + 1 :]
    return tail


def _write(descriptor: int, line: bytes) -> None:
    """Append a line and flush it to disk, all of it or nothing."""
    size, rest = os.fstat(descriptor).st_size, memoryview(line)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, size)
        raise


RUNS = "runs"
HASHED = (METRICS, EVALUATION)  # the final records of a run; eval.jsonl is only there if it was evaluated
OF_THE_PLACE = frozenset({"logging", "resume"})  # tables that say where a run writes, not what it is
NOT_LEARNED = frozenset({"eval", "gaming", "scoring", "watchdog"})  # tables that measure or guard a run


def ledger_folder(path: Path) -> Path:
    """Return the folder whose ledger covers a run or a campaign: the one that holds it.

    A run in `CAMPAIGN/runs/` belongs to the ledger of its campaign, in the folder that holds the campaign.
    """
    folder = path.resolve()
    is_of_campaign = folder.parent.name == RUNS and (folder.parent.parent / CAMPAIGN_FILE).is_file()
    return folder.parent.parent.parent if is_of_campaign else folder.parent


def name_in(folder: Path, path: Path) -> str:
    """Return a run's or campaign's folder relative to that of the ledger, with slashes on every system."""
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
    from retrain.records.identity.copies import input_digests  # `status` needs none of it

    settings = {name: keys for name, keys in table_of(manifest, "config").items() if name not in OF_THE_PLACE}
    hashes = {"settings": seal_of({"settings": settings})}
    if isinstance(identity := manifest.get("identity"), dict):
        hashes["inputs"] = seal_of({"inputs": input_digests(identity)})
    return hashes


def learned_by(manifest: Mapping[str, Any]) -> str:
    """Hash the settings in `run.json` that decide what a run learns, without its seed and its length."""
    settings = [each for each in settings_key(manifest) if each[0].partition(".")[0] not in NOT_LEARNED]
    return seal_of({"learns": settings})


LOG = logging.getLogger("retrain")


def begin(run: RunView) -> None:
    is_resumed, learns = "resumed_at_step" in run.manifest, learned_by(Run(run.folder).record)
    if reason := _append(run, "run_started", {}, first_step=run.first_step, resumed=is_resumed, learns=learns):
        LOG.warning("Not in the ledger: %s. The run goes on; `retrain compare` will say what is unknown", reason)


def end(run: RunView, error: BaseException | None) -> None:
    state = "done" if error is None else "stopped" if isinstance(error, StopRequested) else "failed"
    _append(run, "run_ended", record_hashes(run.folder), state=state, steps=Run(run.folder).num_steps)


def _append(run: RunView, kind: str, hashes: dict[str, str], **fields: Any) -> str:
    folder = ledger_folder(run.folder)
    return append(
        folder,
        kind,
        run=name_in(folder, run.folder),
        started=str(run.manifest.get("started", "")),
        condition=run.condition,
        seed=run.seed,
        **fields,
        hashes=hashes | manifest_hashes(Run(run.folder).record),
    )
