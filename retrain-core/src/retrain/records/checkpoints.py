"""Checkpoints: complete or invisible, verified by checksum before use, pruned once a newer one is complete.

A checkpoint is one folder under `adapter/`: the PEFT adapter, anything else the backend needs, `checkpoint.json` with
the rest of the run's state, and `checksums.json` over all of it. Adapter and state can therefore never disagree.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.kernel.errors import CheckpointError, ConfigError, Problem, RetrainError
from retrain.records.files import REPLACED, digest_of, write_folder
from retrain.records.reading import number, read_if_any, read_regular, table_of
from retrain.records.record_names import ADAPTERS
from retrain.text.terminal_text import printable

STATE, SUMS = "checkpoint.json", "checksums.json"
FINAL = "final"
ADAPTER_CONFIG = "adapter_config.json"  # PEFT's; where it is, there is an adapter
MODEL_FILE = "model.safetensors"  # of a checkpoint where all weights are trained
PRUNED, DAMAGED = ".pruned", ".damaged"
# left free next to a checkpoint: records keep growing, and a run that cannot write them loses steps, not a checkpoint
SPARE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A valid checkpoint and its saved state."""

    path: Path
    state: Mapping[str, Any]

    @property
    def next_step(self) -> int:
        return int(self.state["next_step"])

    @property
    def first_unwritten_step(self) -> int:
        """The first step without recorded completions; an unfinished step already has them."""
        return self.next_step + (self.state["progress"]["unfinished"] is not None)


def save_checkpoint(folder: Path, name: str, fill: Callable[[Path], None], state: Mapping[str, Any]) -> Path:
    """Write `folder/name`: `fill` writes the backend's files, then state and checksums follow; then it appears.

    CheckpointError when a write fails, or less space is free than the last checkpoint took; existing ones stay intact.
    """

    def write(target: Path) -> None:
        try:
            fill(target)
        except (OSError, RetrainError):
            raise
        except Exception as error:  # libraries report a full disk with other exceptions
            raise _unwritten(target, f"{type(error).__name__}: {error}") from error
        (target / STATE).write_text(json.dumps(state, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        files = sorted(file for file in target.rglob("*") if file.is_file())
        sums = {file.relative_to(target).as_posix(): digest_of(file).hexdigest() for file in files}
        # The file ends with its bracket, without a newline, so that truncation by even one byte is detected.
        (target / SUMS).write_text(json.dumps(sums, indent=2), encoding="utf-8")

    try:
        folder.mkdir(parents=True, exist_ok=True)
        newest: Sequence[Path] = checkpoint_folders(folder)[:1]
        wanted = sum(file.stat().st_size for path in newest for file in path.rglob("*") if file.is_file()) + SPARE_BYTES
        free = shutil.disk_usage(folder).free
        if free < wanted:
            what = f"a checkpoint needs about {wanted // 2**20} MiB in {folder}, and {free // 2**20} MiB are free"
            fix = "free some space, or set [training] keep_last; earlier checkpoints are intact"
            raise CheckpointError(Problem(code="checkpoint.no-space", what=what, fix=fix))
        write_folder(folder / name, write)
    except OSError as error:
        raise _unwritten(folder / name, error.strerror or str(error)) from error
    return folder / name


def _unwritten(path: Path, reason: str) -> CheckpointError:
    fix = "free some space or repair the folder, then `retrain --resume RUN`: earlier checkpoints are intact"
    what = f"could not be written: {reason}"
    return CheckpointError(Problem(code="checkpoint.unwritable", where=str(path), what=what, fix=fix))


def _damaged(where: Path | str, reason: str) -> CheckpointError:
    what = f"is damaged: {reason}"
    fix = "use another one: `--resume RUN` finds the newest intact one"
    return CheckpointError(Problem(code="checkpoint.damaged", where=str(where), what=what, fix=fix))


def read_checkpoint(path: Path) -> Checkpoint:
    """Return a checkpoint whose files all match their checksums; CheckpointError names the first that does not."""
    try:
        sums = json.loads(read_regular(path / SUMS))
        # Checksums without the state would vouch for a checkpoint that cannot be resumed.
        for name, wanted in {STATE: "", **sums}.items():
            if digest_of(path / name).hexdigest() != wanted:
                raise _damaged(path / name, "its checksum differs")
        state = json.loads(read_regular(path / STATE))
        return Checkpoint(path=path, state={**state, "next_step": int(state["next_step"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        name = getattr(error, "filename", None) or path
        raise _damaged(name, f"{type(error).__name__}: {error}") from error


def without_checksum(path: Path) -> list[str]:
    """Return the files in a valid checkpoint for which it has no checksum."""
    known = {SUMS, *json.loads(read_regular(path / SUMS))}
    files = (file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir())
    return sorted(set(files) - known)


def newest_valid(folder: Path) -> tuple[Checkpoint | None, list[Problem]]:
    """Return the valid checkpoint with the most steps, and the problems of every newer one."""
    problems: list[Problem] = []
    for path in checkpoint_folders(folder):
        try:
            return read_checkpoint(path), problems
        except CheckpointError as error:
            problems.extend(error.problems)
    return None, problems


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return every checkpoint folder, newest first, also one that a killed replacement left as `.old`."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_dir() and (not path.name.startswith(".") or _is_only(path))]
    return sorted((path for path in found if (path / SUMS).exists() or (path / STATE).exists()), key=_age, reverse=True)


def locate_adapter(path: Path | str) -> Path:
    """Return the folder if it holds an adapter, otherwise the newest checkpoint of a run or of its `adapter` folder."""

    def unusable(what: str, fix: str, *, code: str) -> ConfigError:
        return ConfigError(Problem(code=code, where=printable(str(path)), what=what, fix=fix))

    if "://" in str(path):
        fix = "download the adapter, then give its folder"
        what = "is stored on a service; only folders can be read"
        raise unusable(what=what, fix=fix, code="model.adapter-remote")
    folder = Path(path).expanduser()
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "there is no such folder"
        fix = f"give the folder that holds {ADAPTER_CONFIG}"
        raise unusable(what=what, fix=fix, code="model.adapter-missing")
    for found in (folder, *checkpoint_folders(folder), *checkpoint_folders(folder / ADAPTERS)):
        if (found / ADAPTER_CONFIG).is_file():
            return found
    if any((found / MODEL_FILE).is_file() for found in (folder, *checkpoint_folders(folder / ADAPTERS))):
        fix = "name its checkpoint as [model] model instead"
        raise unusable(what="holds whole models (lora_rank = 0), no adapter", fix=fix, code="model.whole-model")
    what = f"holds no {ADAPTER_CONFIG}, and no run's checkpoints"
    raise unusable(what=what, fix="give an adapter folder or a run", code="model.no-adapter")


def prune(folder: Path, *, keep_last: int, keep_best: int, metric: str) -> list[Path]:
    """Remove all but the newest `keep_last` and the `keep_best` by `metric`; 0 and 0 keeps all. Return the removed."""
    paths = [path for path in checkpoint_folders(folder) if path.name != FINAL]
    if not (keep_last or keep_best) or not paths:
        return []
    # The newest always stays, because a resume continues from it.
    kept = {*paths[: max(keep_last, 1)], *_by_metric(paths, metric)[:keep_best]}
    removed = [path for path in paths if path not in kept]
    for path in removed:
        # invisible at once, even if the removal is interrupted
        hidden = path.with_name(f".{path.name}{PRUNED}")
        path.rename(hidden)
        shutil.rmtree(hidden)
    return removed


def best_of(paths: Sequence[Path], metric: str) -> Path | None:
    """Return the checkpoint with the highest `metric`, of equal ones the first; None without that metric."""
    return next(iter(_by_metric(paths, metric)), None)


def clear_unfinished(folder: Path) -> None:
    """Remove leftovers of an interrupted write or removal; such folders were never visible as checkpoints."""
    for path in folder.glob(".*") if folder.is_dir() else ():
        if path.is_dir() and path.suffix in (".tmp", REPLACED, PRUNED):
            if _is_only(path):
                path.rename(_original(path))
            else:
                shutil.rmtree(path, ignore_errors=True)


def set_newer_aside(folder: Path, checkpoint: Checkpoint | None) -> None:
    """Hide every checkpoint newer than the one a run continues from: they are damaged and will be written again."""
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


def _by_metric(paths: Sequence[Path], name: str) -> list[Path]:
    found = [(number(table_of(read_if_any(path / STATE), "metrics").get(name)), path) for path in paths]
    scored = [(value, path) for value, path in found if value is not None]
    return [path for _, path in sorted(scored, key=lambda pair: pair[0], reverse=True)]


def steps_of(path: Path) -> int:
    return _age(path)[0]


def _age(path: Path) -> tuple[int, bool]:
    """Return the number of optimizer steps, from its state or otherwise its name; `final` is the newest."""
    name = _original(path).name if path.name.startswith(".") else path.name
    try:
        steps = Checkpoint(path=path, state=read_if_any(path / STATE)).first_unwritten_step
    except (ValueError, KeyError, TypeError):
        # `final` without its state still counts as the newest, so that its damage is reported.
        digits = name.rpartition("_")[2]
        is_number = digits.removeprefix("-").isdecimal()
        steps = int(digits) if is_number else sys.maxsize if name == FINAL else 0
    return steps, name == FINAL
