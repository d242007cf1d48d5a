"""The run folder: locked by one run at a time; records of an earlier run are moved aside, never overwritten."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from retrain.kernel.errors import ConfigError, Problem
from retrain.rooms.session.records.checkpoints import checkpoint_folders
from retrain.rooms.session.records.files import JsonLines, cannot_write, write_json, write_text
from retrain.rooms.session.records.lock import RunLock, owner_of
from retrain.rooms.session.records.rewind import record_sizes
from retrain.rooms.session.records.tokens import TokenRecord, token_file, write_tokens

LOG = logging.getLogger("retrain")
MARK = "run.json"


class RunFolder:
    """`<log_dir>` of one run: `run.json`, `config.toml`, `metrics.jsonl`, `emergence/`, `trainer_state.json`."""

    def __init__(self, path: Path, adapters: Path) -> None:
        self.path = path
        self.adapters = adapters
        self.started = ""
        path.mkdir(parents=True, exist_ok=True)
        self._lock = RunLock(path)
        self._metrics = JsonLines(path / "metrics.jsonl")
        self._steps = JsonLines(path / "emergence" / "steps.jsonl")
        self._generations = JsonLines(path / "emergence" / "generations.jsonl")

    def write_manifest(self, manifest: Mapping[str, Any], config_toml: str) -> None:
        """Write `run.json`, and the resolved `config.toml`, which reproduces the run as it is."""
        self.started = str(manifest.get("started", ""))
        try:
            write_text(self.path / "config.toml", config_toml)
            write_json(self.path / MARK, manifest)
        except OSError as error:
            raise cannot_write(self.path / MARK, error) from error

    def rewrite_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Replace `run.json` to record how the run ended; a write error is only logged, so as to mask no other."""
        try:
            write_json(self.path / MARK, manifest)
        except OSError as error:
            LOG.warning("%s", cannot_write(self.path / MARK, error))

    def write_completions(
        self,
        step: int,
        summary: Mapping[str, Any],
        generations: Iterable[Mapping[str, Any]],
        tokens: Sequence[TokenRecord],
    ) -> None:
        """Write everything about a step except its metrics line, which comes last and marks the step as complete."""
        try:
            write_tokens(self.path / "emergence", step, tokens)
        except OSError as error:
            raise cannot_write(token_file(self.path / "emergence", step), error) from error
        self._generations.write(generations)
        self._steps.write([summary])

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Append a step's line to `metrics.jsonl`, or that of the evaluation before training."""
        self._metrics.write([metrics])

    def sync(self) -> dict[str, int]:
        """Flush the record files to disk; return their sizes, for a checkpoint."""
        for stream in (self._metrics, self._steps, self._generations):
            stream.sync()
        return record_sizes(self.path)

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Replace `trainer_state.json`."""
        file = self.path / "trainer_state.json"
        try:
            write_json(file, state)
        except OSError as error:
            raise cannot_write(file, error) from error

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self._metrics, self._steps, self._generations):
            stream.close()
        self._lock.release()


def open_run_folder(log_dir: str, adapter_path: str) -> RunFolder:
    """Open `log_dir` for a new run; records of an earlier run there move to `<log_dir>.1`, `.2`, ..."""
    path, adapters = _folders(log_dir, adapter_path)
    if (path / MARK).exists():
        RunLock(path).release()  # another process may have started here since the check: its folder must not move
        _move_records_aside(path)
    if checkpoint_folders(adapters):  # in a configured adapter_path; a resume would mistake them for this run's
        _move_records_aside(adapters)
    return RunFolder(path, adapters)


def move_aside(path: Path) -> Path:
    """Rename a folder to `<name>.1`, `.2`, ... and return the new path, so that nothing is overwritten."""
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(aside)
    return aside


def _move_records_aside(path: Path) -> None:
    LOG.info("Records of an earlier run in %s moved to %s", path, move_aside(path))


def check_run_folder(log_dir: str, adapter_path: str, *, place: str) -> None:
    """ConfigError when the folders are not writable, or belong to a run that is still going on."""
    path, adapters = _folders(log_dir, adapter_path)
    if pid := owner_of(path):
        what = f"{path} belongs to a run that is still going on (process {pid})"
        raise ConfigError(Problem(where=place, what=what, fix="wait for it, or choose another --log-dir"))
    if Path.cwd().resolve().is_relative_to(path.resolve()):  # moving records aside would move the user's files
        what = f"{path} is the current folder, or holds it"
        raise ConfigError(Problem(where=place, what=what, fix="choose a folder of its own, such as logs/train"))
    refuse_unwritable(path, adapters, place=place)


def refuse_unwritable(*folders: Path, place: str) -> None:
    """ConfigError unless files can be created in each folder; a missing one is created only for the test."""
    for folder in folders:
        made = [each for each in (folder, *folder.parents) if not each.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            for each in made:  # a run that does not start leaves nothing behind
                each.rmdir()
        except OSError as error:
            what = f"cannot write {folder}: {error.strerror or error}"
            fix = "choose folders that you may write: [logging] log_dir, [backend] adapter_path"
            raise ConfigError(Problem(where=place, what=what, fix=fix)) from error


def _folders(log_dir: str, adapter_path: str) -> tuple[Path, Path]:
    path = Path(log_dir).expanduser()
    return path, Path(adapter_path).expanduser() if adapter_path else path / "adapter"
