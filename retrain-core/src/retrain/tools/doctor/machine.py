"""Python, and the folders that a run writes to."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.diagnosis import Diagnosis, Status
from retrain.kernel.errors import ConfigError
from retrain.kernel.version import __version__
from retrain.records.folder import check_run_folder
from retrain.tools.doctor.installation import examine

LOW_DISK_BYTES = 5 * 10**9  # roughly the checkpoints of a LoRA run on a 4B model


def diagnose_machine(config: Config | None) -> list[Diagnosis]:
    """The interpreter, and the run folder; without a configuration the current folder."""
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    python = Diagnosis(name="python", status="ok", detail=f"{detail}, retrain {__version__}", needed=config is not None)
    return [python, _installation(), _run_folder(config) if config else _disk(Path.cwd(), name="disk")]


def _installation() -> Diagnosis:
    """Whether files of retrain-core were replaced, by the public package of the same import name above all."""
    found = examine()
    status: Status = "ok" if found.is_whole else "failed" if found.public or found.missing else "warn"
    return Diagnosis(name="installation", status=status, detail=found.detail, fix=found.fix, needed=not found.is_whole)


def _run_folder(config: Config) -> Diagnosis:
    if resumed := config.resume.from_:
        return _disk(Path(resumed).expanduser(), name="run folder")
    place = config.place("logging.log_dir")
    try:
        check_run_folder(config.logging.log_dir, config.backend.adapter_path, place=place)
    except ConfigError as error:
        problem = error.problems[0]
        detail = f"{place}: {problem.what}"
        return Diagnosis(name="run folder", status="failed", detail=detail, fix=problem.fix, needed=True)
    return _disk(Path(config.logging.log_dir).expanduser(), name="run folder", needed=True)


def _disk(folder: Path, *, name: str, needed: bool = False) -> Diagnosis:
    existing = next((each for each in (folder, *folder.absolute().parents) if each.exists()), Path("/"))
    free = shutil.disk_usage(existing).free
    detail = f"{folder}: {free / 1e9:.1f} GB free"
    if free < LOW_DISK_BYTES:
        fix = "free some space: a full disk ends the run at a checkpoint"
        return Diagnosis(name=name, status="warn", detail=detail, fix=fix, needed=needed)
    return Diagnosis(name=name, status="ok", detail=detail, needed=needed)
