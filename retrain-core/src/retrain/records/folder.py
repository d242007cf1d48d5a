"""The run folder: locked by one run at a time; records of an earlier run are moved aside, never overwritten."""

from __future__ import annotations

import itertools
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from retrain.kernel.errors import ConfigError, Problem, RecordError, ResumeError
from retrain.records import files, record_names
from retrain.records.checkpoints import checkpoint_folders
from retrain.records.completions import TokenRecord, write_tokens
from retrain.records.files import JsonLines, RunLock, is_at, new_digest, reported
from retrain.records.record_names import EVALUATION, FILES, RUN_FILE, token_file

LOG = logging.getLogger("retrain")
SIZES, CHECKSUMS = "record_sizes", "record_checksums"  # of the record files, in a checkpoint's state


class RunFolder(AbstractContextManager["RunFolder"]):
    """The `log_dir` of one run, open for writing: every file in `record_names`."""

    def __init__(self, path: Path, adapters: Path) -> None:
        self.path = path
        self.adapters = adapters
        self.started = ""
        path.mkdir(parents=True, exist_ok=True)
        self._lock = RunLock(path)
        self._files = {name: JsonLines(path / name) for name in FILES if name != EVALUATION or (path / name).exists()}
        self._adapters_descriptor = _opened(adapters)
        self._described: tuple[Mapping[str, Any], str] = ({}, "")
        self.failure: RecordError | None = None

    def write_manifest(self, manifest: Mapping[str, Any], config_toml: str) -> None:
        """Write `run.json`, and the resolved `config.toml` that reproduces the run."""
        self.started = str(manifest.get("started", ""))
        self._described = manifest, config_toml
        with reported(self.path / RUN_FILE):
            files.write_text(self.path / record_names.CONFIG_FILE, config_toml)
            files.write_json(self.path / RUN_FILE, manifest)

    def rewrite_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Replace `run.json` to record how the run ended; a write error is only logged, so as to mask no other."""
        try:
            with reported(self.path / RUN_FILE):
                files.write_json(self.path / RUN_FILE, manifest)
        except RecordError as error:
            LOG.warning("%s", error)

    def write_completions(
        self,
        step: int,
        summary: Mapping[str, Any],
        generations: Iterable[Mapping[str, Any]],
        tokens: Sequence[TokenRecord],
    ) -> None:
        """Write everything about a step except its metrics line; that comes last and marks the step as complete."""
        with reported(token_file(self.path, step)):
            token_line = write_tokens(self.path, step, tokens)
        self._files[record_names.TOKEN_FILES].write([token_line])
        self._files[record_names.GENERATIONS].write(generations)
        self._files[record_names.STEPS].write([summary])

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        self._files[record_names.METRICS].write([metrics])

    def write_evaluation(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append a line per example to `eval.jsonl`; the first one creates the file."""
        if EVALUATION not in self._files:
            self._files[EVALUATION] = JsonLines(self.path / EVALUATION)
        self._files[EVALUATION].write(records)

    def sync(self) -> dict[str, Any]:
        """Flush the record files to disk; return their sizes and checksums, for a checkpoint."""
        for file in self._files.values():
            file.sync()
        checksums = {name: file.digest.hexdigest() for name, file in self._files.items()}
        return {SIZES: record_sizes(self.path), CHECKSUMS: checksums}

    def rewind(self, sizes: Mapping[str, Any], next_step: int, digests: Mapping[str, blake2b]) -> None:
        rewind_records(self.path, sizes, next_step)
        for name, file in self._files.items():
            file.continue_from(digests.get(name, new_digest()))

    def leave_if_lost(self, *, for_checkpoint: bool = False) -> RecordError | None:
        """Move to a new folder, with every line so far, if files were deleted, moved or cut; return the error."""
        lost = next((name for name, file in self._files.items() if file.is_lost), None)
        where = self.path / lost if lost else self.adapters
        what = "was deleted, moved, replaced or cut during the run"
        with reported(where):
            if lost:
                saved = free_name(self.path, ".rescued")
                if self.adapters.is_relative_to(self.path):
                    self.adapters = saved / self.adapters.relative_to(self.path)
                self._files = {name: file.copied_to(saved / name) for name, file in self._files.items()}
                self.path = saved
                # Between the two locks the run would have no owner, and another one could move its folder.
                former, self._lock = self._lock, RunLock(saved)
                former.release()
                self.hold_adapters()
                self.write_manifest(*self._described)
                why, fix = f"the state of the run is saved in {saved}", f"`retrain --resume {saved}` continues there"
                problem = Problem(code="record.files-lost", where=str(where), what=what, why=why, fix=fix)
            elif for_checkpoint and self._adapters_descriptor >= 0 and not is_at(self._adapters_descriptor, where):
                self.adapters = free_name(self.adapters, ".rescued")
                self.hold_adapters()
                why = f"checkpoints are saved in {self.adapters} from now on"
                fix = f"move it to {where}, then `retrain --resume {self.path}`"
                problem = Problem(code="checkpoint.folder-lost", where=str(where), what=what, why=why, fix=fix)
            else:
                return None
        self.failure = RecordError(problem)
        return self.failure

    def hold_adapters(self) -> None:
        """Open the folder of the checkpoints, so that its replacement is noticed."""
        if self._adapters_descriptor >= 0:
            os.close(self._adapters_descriptor)
        self._adapters_descriptor = _opened(self.adapters)

    def write_state(self, state: Mapping[str, Any]) -> None:
        with reported(self.path / record_names.TRAINER_STATE):
            files.write_json(self.path / record_names.TRAINER_STATE, state)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and release the folder; idempotent."""
        for file in self._files.values():
            file.close()
        if self._adapters_descriptor >= 0:
            os.close(self._adapters_descriptor)
        self._adapters_descriptor = -1
        self._lock.release()


def record_sizes(run: Path) -> dict[str, int]:
    return {name: (run / name).stat().st_size for name in FILES if (run / name).exists()}


def rewind_records(run: Path, sizes: Mapping[str, Any], next_step: int) -> None:
    """Truncate every record file to its size at the checkpoint, and remove the token records of later steps."""
    # all files before the first is cut, so that a refused resume has changed nothing
    check_sizes(run, sizes)
    for name in FILES:
        if (run / name).exists():
            with (run / name).open("r+b") as stream:
                stream.truncate(int(sizes.get(name, 0)))
    for file in (run / record_names.TOKENS).glob("*"):
        if file.name >= token_file(run, next_step).name or file.name.startswith("."):
            file.unlink()


def check_sizes(run: Path, sizes: Mapping[str, Any]) -> None:
    """ResumeError when a record file is shorter than at the checkpoint."""
    for name, size in sizes.items():
        file = run / name
        present: int = file.stat().st_size if file.exists() else 0
        if present < int(size):
            what = f"has {present} bytes, and the checkpoint was made at {size}"
            fix = "restore the file, or start a new run"
            raise ResumeError(Problem(code="resume.record-cut", where=str(file), what=what, fix=fix))


def open_run_folder(log_dir: str, adapter_path: str) -> RunFolder:
    """Open `log_dir` for a new run; records of an earlier run move to `<log_dir>.1`, `.2`, ..."""
    path, adapters = _folders(log_dir, adapter_path)
    if (path / RUN_FILE).exists():
        # another process may have started here since the check: its folder must not move
        RunLock(path).release()
        LOG.info("Records of an earlier run in %s moved to %s", path, move_aside(path))
    if checkpoint_folders(adapters):
        # in a configured adapter_path; a resume would mistake them for this run's
        LOG.info("Records of an earlier run in %s moved to %s", adapters, move_aside(adapters))
    return RunFolder(path, adapters)


def move_aside(path: Path) -> Path:
    """Rename a folder to `<name>.1`, `.2`, ... and return the new path."""
    aside = free_name(path)
    path.rename(aside)
    return aside


def free_name(path: Path, suffix: str = "") -> Path:
    """Return the first of `<name><suffix>` (if there is one), `<name><suffix>.1`, `.2`, ... that does not exist."""
    named = path.with_name(path.name + suffix)
    numbered = (named.with_name(f"{named.name}.{n}") for n in itertools.count(1))
    candidates = itertools.chain([named] if suffix else [], numbered)
    # lexists, since a broken link occupies its name, too
    return next(candidate for candidate in candidates if not os.path.lexists(candidate))


def _opened(folder: Path) -> int:
    """Return a descriptor of a folder, by which its replacement can be noticed; -1 if it does not exist."""
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return -1


def check_run_folder(log_dir: str, adapter_path: str, *, place: str) -> None:
    """ConfigError when the folders are not writable, or a run in progress uses them."""
    path, adapters = _folders(log_dir, adapter_path)
    if files.owner_of(path):
        raise files.in_use(path, where=place)
    if Path.cwd().resolve().is_relative_to(path.resolve()):
        # A next run moves the records aside, and the user's files with them.
        what, fix = f"{path} is the current folder, or holds it", "choose a separate folder, such as logs/train"
        raise ConfigError(Problem(code="run.folder-is-current", where=place, what=what, fix=fix))
    refuse_unwritable(path, adapters, place=place)


def refuse_unwritable(*folders: Path, place: str) -> None:
    """ConfigError unless files can be created in each folder; a missing one is created only for the test."""
    for folder in folders:
        try:
            try:
                _try_out(folder)
            except FileNotFoundError:
                # another run that begins tried it out as well, and has removed it again
                _try_out(folder)
        except OSError as error:
            raise files.unwritable(folder, error, where=place) from error


def _try_out(folder: Path) -> None:
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
    with suppress(OSError):  # another run may have begun in one of them
        for each in made:  # a run that does not start leaves nothing behind
            each.rmdir()


def _folders(log_dir: str, adapter_path: str) -> tuple[Path, Path]:
    path = Path(log_dir).expanduser()
    return path, Path(adapter_path).expanduser() if adapter_path else path / record_names.ADAPTERS
