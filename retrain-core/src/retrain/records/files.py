"""Atomic writes (temporary name, flush, rename) without known secrets, checksums, and the lock of a run folder."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from retrain.kernel.config.toml_file import open_regular
from retrain.kernel.errors import ConfigError, Problem, RecordError
from retrain.text.secrets import redacted, redacted_json

REPLACED = ".old"
CHUNK = 2**20


def write_text(path: Path, text: str) -> None:
    """Replace a file by `text`; a reader sees the old content or the new, never a mixture."""
    write_bytes(path, redacted(text).encode("utf-8"))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file; ValueError on NaN or infinity."""
    write_bytes(path, f"{redacted_json([content], indent=2)[0]}\n".encode())


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make `path` a folder that `fill` writes, visible once complete; the replaced one is briefly `.<name>.old`."""
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        fill(temporary)
        for entry in (temporary, *temporary.rglob("*")):
            sync_folder(entry)  # works for files as well
    except BaseException:
        # half a checkpoint must not occupy space that a whole one needs
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if path.exists():
        outdated = path.with_name(f".{path.name}{REPLACED}")
        shutil.rmtree(outdated, ignore_errors=True)
        # Linux cannot swap two folders in one portable call: a kill between the renames leaves only `.old`.
        path.rename(outdated)
        temporary.rename(path)
        shutil.rmtree(outdated)
    else:
        temporary.rename(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to disk; otherwise a power failure can undo a rename."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def new_digest(content: bytes = b"") -> blake2b:
    """Return the checksum of 16 bytes that files and inputs are recorded with; `update` continues it."""
    return blake2b(content, digest_size=16)


def digest_of(file: Path, size: int = sys.maxsize) -> blake2b:
    """Return the checksum of a file, or of its first `size` bytes."""
    digest, left = new_digest(), size
    with open_regular(file) as stream:
        while chunk := stream.read(min(left, CHUNK)):
            digest.update(chunk)
            left -= len(chunk)
    return digest


def is_at(descriptor: int, path: Path) -> bool:
    """True if an open file or folder is still the one at `path`: neither deleted, moved nor replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


class JsonLines:
    """A JSONL file that grows by whole lines, all of a batch or none; `digest` is the checksum of all its lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with reported(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # without a buffer nothing is written twice or late
            self._stream = path.open("a+b", buffering=0)
        self._size = os.fstat(self._stream.fileno()).st_size
        self.digest = new_digest()

    def continue_from(self, digest: blake2b) -> None:
        """Continue after the file was cut to these lines."""
        self._size, self.digest = os.fstat(self._stream.fileno()).st_size, digest

    @property
    def is_lost(self) -> bool:
        """True if the file is no longer at its path, or something else has cut it."""
        return not is_at(self._stream.fileno(), self._path) or os.fstat(self._stream.fileno()).st_size < self._size

    def copied_to(self, path: Path) -> JsonLines:
        """Return a new file with all lines of this one, even if it was deleted, and close this one."""
        copy = JsonLines(path)
        self._stream.seek(0)
        while chunk := self._stream.read(CHUNK):
            copy.append(chunk)
        self.close()
        return copy

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records; ValueError on NaN or infinity, RecordError when the write fails."""
        self.append("".join(f"{line}\n" for line in redacted_json(records)).encode("utf-8"))

    def append(self, content: bytes) -> None:
        """Append bytes, all or none of them."""
        with reported(self._path):
            append_whole(self._stream.fileno(), content)
        self._size += len(content)
        self.digest.update(content)

    def sync(self) -> None:
        with reported(self._path):
            os.fsync(self._stream.fileno())

    def close(self) -> None:
        self._stream.close()


def append_whole(descriptor: int, content: bytes, *, sync: bool = False) -> None:
    """Append bytes to a file, all or none of them; with `sync`, they are on disk afterwards."""
    size, rest = os.fstat(descriptor).st_size, memoryview(content)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        if sync:
            os.fsync(descriptor)
    except OSError:
        # Half a line would make the next append unreadable, too.
        os.ftruncate(descriptor, size)
        raise


@contextmanager
def reported(path: Path) -> Iterator[None]:
    """Turn an OSError in the block into the RecordError that `path` could not be written."""
    try:
        yield
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        fix = "free space or repair the folder, then `retrain --resume RUN`: checkpoints and earlier records are intact"
        raise RecordError(Problem(code="record.unwritable", where=str(path), what=what, fix=fix)) from error


SEAL = "sha256"


def hash_of(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of plain data, whatever the order of its keys; other values count as their text."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def seal_of(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record without its `sha256`, as canonical JSON (sorted keys, no spaces, UTF-8)."""
    hashed = {name: value for name, value in content.items() if name != SEAL}
    text = json.dumps(hashed, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def write_bytes(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()  # on a full disk every byte counts
        raise


LOCK_FILE = ".lock"
# A new run waits for as long as `owner_of` of another process may hold a free lock: an instant.
PATIENCE_S, PAUSE_S = 0.2, 0.01


def unwritable(path: Path, error: OSError, *, where: str = "") -> ConfigError:
    what = f"cannot write {path}: {error.strerror or error}"
    fix = "choose folders that you may write: [logging] log_dir, [backend] adapter_path"
    return ConfigError(Problem(code="run.folder-unwritable", where=where, what=what, fix=fix))


def in_use(folder: Path, *, where: str = "") -> ConfigError:
    what = f"{folder} belongs to a run in progress (process {owner_of(folder)})"
    fix = "wait for it, or choose another --log-dir"
    return ConfigError(Problem(code="run.folder-in-use", where=where, what=what, fix=fix))


class RunLock:
    """An advisory lock on a run folder, held until `release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        try:
            self._stream = (path / LOCK_FILE).open("a+", encoding="utf-8")
        except OSError as error:
            raise unwritable(path / LOCK_FILE, error) from error
        if not take_lock(self._stream, PATIENCE_S):
            self._stream.close()
            raise in_use(path)
        self._stream.truncate(0)
        self._stream.write(f"{os.getpid()} {socket.gethostname()}\n")
        self._stream.flush()

    def release(self) -> None:
        self._stream.close()


def take_lock(stream: IO[Any], patience_s: float) -> bool:
    """Lock an open file for this process; False when another one holds it for so long."""
    end = time.monotonic() + patience_s
    while True:
        try:
            # flock belongs to the open file. A lock by fcntl would be lost when this process closes any reader of it.
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(PAUSE_S)
        else:
            return True


def owner_of(path: Path) -> int:
    """Return the process id of the run in this folder; 0 without one, -1 if it is not one of this machine."""
    with suppress(OSError), open_regular(path / LOCK_FILE) as stream:
        try:
            # shared, so that two readers do not take each other for a run
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, _, host = stream.read().decode("utf-8", "replace").strip().partition(" ")
            return int(pid) if pid.isdigit() and host in ("", socket.gethostname()) else -1
    return 0
