"""Rewinds the records of a run to a checkpoint, so that everything after it is written only once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrain.kernel.errors import Problem, ResumeError
from retrain.records.reading import read_regular
from retrain.records.tokens import FOLDER, token_file

METRICS, STEPS, GENERATIONS = "metrics.jsonl", "emergence/steps.jsonl", "emergence/generations.jsonl"
TOKEN_FILES = "emergence/token_files.jsonl"  # size and checksum of each step's token file
EVALUATION = "eval.jsonl"
FILES = (METRICS, STEPS, GENERATIONS, TOKEN_FILES, EVALUATION)
CHECKSUMS = "record_checksums"  # of these files, in a checkpoint's state beside `record_sizes`


def record_sizes(run: Path) -> dict[str, int]:
    """Bytes in each record file, to be stored with a checkpoint."""
    return {name: (run / name).stat().st_size for name in FILES if (run / name).exists()}


def check_sizes(run: Path, sizes: Mapping[str, Any]) -> None:
    """ResumeError when a record file is shorter than at the checkpoint: something else truncated it."""
    for name, size in sizes.items():
        file = run / name
        present = file.stat().st_size if file.exists() else 0
        if present < int(size):
            what = f"has {present} bytes, and the checkpoint was made at {size}"
            raise ResumeError(Problem(where=str(file), what=what, fix="restore the file, or start a new run"))


def rewind_records(run: Path, sizes: Mapping[str, Any], next_step: int) -> None:
    """Truncate every record file to its size at the checkpoint, and remove the token records of later steps."""
    check_sizes(run, sizes)
    for name in FILES:
        if (run / name).exists():
            with (run / name).open("r+b") as stream:
                stream.truncate(int(sizes.get(name, 0)))
    for file in (run / "emergence" / FOLDER).glob("*"):
        if file.name >= token_file(Path(), next_step).name or file.name.startswith("."):
            file.unlink()


def read_manifest(run: Path) -> Mapping[str, Any]:
    """`run.json` of a run; ResumeError when there is none."""
    try:
        manifest: Mapping[str, Any] = json.loads(read_regular(run / "run.json"))
        int(manifest["seed"]), str(manifest["started"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"cannot be read: {type(error).__name__}: {error}"
        fix = "give the log_dir of a run that had started"
        raise ResumeError(Problem(where=str(run / "run.json"), what=what, fix=fix)) from error
    return manifest
