"""Checkpoints: complete or invisible, checked by checksum before they are trusted, pruned when a newer one stands.

A checkpoint is one folder under `adapter/`: the PEFT adapter, whatever else the backend needs, `checkpoint.json` with
the rest of the run's state, and `checksums.json` over all of it. Adapter and state can therefore never disagree.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.kernel.errors import CheckpointError, Problem, RetrainError
from retrain.rooms.session.records.files import REPLACED, write_folder

STATE, SUMS = "checkpoint.json", "checksums.json"
FINAL = "final"
PRUNED, DAMAGED = ".pruned", ".damaged"
SPARE_BYTES = 64 * 2**20  # left free beside a checkpoint, for the records that go on growing
CHUNK = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A valid checkpoint: its folder, and the state that was saved with it."""

    path: Path
    state: Mapping[str, Any]

    @property
    def next_step(self) -> int:
        """The step that a run continues with."""
        return int(self.state["next_step"])

    @property
    def first_unwritten_step(self) -> int:
        """The first step whose completions are not on record yet: an unfinished step has its own already."""
        return self.next_step + (self.state["progress"]["unfinished"] is not None)


def save_checkpoint(folder: Path, name: str, fill: Callable[[Path], None], state: Mapping[str, Any]) -> Path:
    """Write `folder/name`: `fill` puts the backend's files in, then state and checksums follow; then it appears.

    CheckpointError when the disk has not the room that the last checkpoint took, or a write fails; nothing that
    existed is touched then.
    """

    def write(target: Path) -> None:
        _fill(target, fill)
        (target / STATE).write_text(json.dumps(state, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        files = sorted(file for file in target.rglob("*") if file.is_file())
        sums = {file.relative_to(target).as_posix(): _checksum(file) for file in files}
        (target / SUMS).write_text(
            json.dumps(sums, indent=2), encoding="utf-8"
        )  # ends with its bracket: no byte can be cut off unnoticed

    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_space(folder)
        write_folder(folder / name, write)
    except OSError as error:
        raise _unwritten(folder / name, error.strerror or str(error)) from error
    return folder / name


def _fill(target: Path, fill: Callable[[Path], None]) -> None:
    try:
        fill(target)
    except (OSError, RetrainError):
        raise
    except Exception as error:  # libraries tell of a full disk with errors of their own
        raise _unwritten(target, f"{type(error).__name__}: {error}") from error


def _unwritten(path: Path, reason: str) -> CheckpointError:
    fix = "free some space or mend the folder, then `retrain --resume RUN`: earlier checkpoints are whole"
    return CheckpointError(Problem(where=str(path), what=f"could not be written: {reason}", fix=fix))


def _damaged(where: Path | str, what: str) -> CheckpointError:
    fix = "take another one: `--resume RUN` finds the newest that is whole"
    return CheckpointError(Problem(where=str(where), what=what, fix=fix))


def read_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint whose every file is as it was written; CheckpointError names the first that is not."""
    try:
        sums = json.loads((path / SUMS).read_text(encoding="utf-8"))
        for name, wanted in {STATE: "", **sums}.items():
            if _checksum(path / name) != wanted:
                raise _damaged(path / name, "is damaged: its checksum differs")
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        return Checkpoint(path=path, state={**state, "next_step": int(state["next_step"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        name = getattr(error, "filename", None) or path
        raise _damaged(name, f"cannot be read: {type(error).__name__}: {error}") from error


def newest_valid(folder: Path) -> tuple[Checkpoint | None, list[Problem]]:
    """The valid checkpoint of the highest step, and what is wrong with every newer one."""
    problems: list[Problem] = []
    for path in checkpoint_folders(folder):
        try:
            return read_checkpoint(path), problems
        except CheckpointError as error:
            problems.extend(error.problems)
    return None, problems


def checkpoint_folders(folder: Path) -> list[Path]:
    """Every checkpoint folder, newest first, damaged ones included.

    Where a replacement was killed between its two renames, the replaced folder still stands for its name.
    """
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_dir() and (not path.name.startswith(".") or _is_only(path))]
    return sorted((path for path in found if (path / SUMS).exists() or (path / STATE).exists()), key=_age, reverse=True)


def prune(folder: Path, *, keep_last: int, keep_best: int, metric: str) -> list[Path]:
    """Remove all but the newest `keep_last` and the `keep_best` with the highest `metric`; 0 and 0 keeps all.

    The final checkpoint stays, and so does the newest of all. Returns what was removed.
    """
    paths = [path for path in checkpoint_folders(folder) if path.name != FINAL]
    if not (keep_last or keep_best) or not paths:
        return []
    scored = [(value, path) for path in paths if (value := _metric(path, metric)) is not None]
    best = [path for _, path in sorted(scored, key=lambda pair: pair[0], reverse=True)[:keep_best]]
    kept = {*paths[: max(keep_last, 1)], *best}
    removed = [path for path in paths if path not in kept]
    for path in removed:
        hidden = path.with_name(f".{path.name}{PRUNED}")  # gone at once, even if removing its files is interrupted
        path.rename(hidden)
        shutil.rmtree(hidden)
    return removed


def clear_unfinished(folder: Path) -> None:
    """Remove what an interrupted write or removal left; such folders were never visible as checkpoints."""
    for path in folder.glob(".*") if folder.is_dir() else ():
        if path.is_dir() and path.suffix in (".tmp", REPLACED, PRUNED):
            if _is_only(path):
                path.rename(_original(path))
            else:
                shutil.rmtree(path, ignore_errors=True)


def set_newer_aside(folder: Path, checkpoint: Checkpoint | None) -> None:
    """Hide every checkpoint newer than the one a run continues from: they are damaged, and steps to come anyway."""
    for path in checkpoint_folders(folder):
        if checkpoint is not None and path == checkpoint.path:
            return
        aside = path.with_name(f".{path.name}{DAMAGED}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)


def _is_only(path: Path) -> bool:
    return path.suffix == REPLACED and not _original(path).exists()


def _original(path: Path) -> Path:
    return path.with_name(path.name.removeprefix(".").removesuffix(path.suffix))


def _check_space(folder: Path) -> None:
    newest: Sequence[Path] = checkpoint_folders(folder)[:1]
    wanted = sum(file.stat().st_size for path in newest for file in path.rglob("*") if file.is_file()) + SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < wanted:
        what = f"a checkpoint needs about {wanted // 2**20} MiB in {folder}, and {free // 2**20} MiB are free"
        fix = "free some space, or set [training] keep_last; earlier checkpoints are whole"
        raise CheckpointError(Problem(what=what, fix=fix))


def _metric(path: Path, name: str) -> float | None:
    try:
        value = json.loads((path / STATE).read_text(encoding="utf-8"))["metrics"].get(name)
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return float(value) if isinstance(value, int | float) else None


def _age(path: Path) -> tuple[int, bool]:
    """Optimizer steps in it, by what the state says or else by the folder's name; a final one is then the newest."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        steps = Checkpoint(path=path, state=state).first_unwritten_step
    except (OSError, ValueError, KeyError, TypeError):
        digits = _plain_name(path).rpartition("_")[2]
        steps = int(digits) if digits.isdecimal() else sys.maxsize if _plain_name(path) == FINAL else 0
    return steps, _plain_name(path) == FINAL


def _plain_name(path: Path) -> str:
    return _original(path).name if path.name.startswith(".") else path.name


def _checksum(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
