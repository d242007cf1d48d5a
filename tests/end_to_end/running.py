"""Runs the installed `retrain` script the way a user does, and reads what it left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.end_to_end.preloaded import popen

SCRIPT = Path(sys.executable).with_name("retrain")
TIMING = ("time_s",)
SMALL = ("--max-steps", "3", "--batch-size", "4", "--group-size", "4", "--eval-examples", "0", "--save-every", "2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    code: int
    out: str
    err: str


def retrain(*arguments: str, cwd: Path, environ: dict[str, str] | None = None) -> Outcome:
    """Run the script in `cwd`, piped; if it is to train, in a process that has torch."""
    program, env = [str(SCRIPT), *arguments], {**os.environ, **(environ or {})}
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("--help", "--version")):
        process = popen(program, cwd=cwd, env=env)
        try:
            out, err = process.communicate(timeout=600)
        finally:
            process.kill()  # a run that takes too long; any other has ended
        return Outcome(code=process.returncode, out=out, err=err)
    done = subprocess.run(program, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)
    return Outcome(code=done.returncode, out=done.stdout, err=done.stderr)


def tiny(*arguments: str, cwd: Path) -> Outcome:
    """Train `builtin:tiny` from its template with overrides; fails the test unless the run succeeds."""
    if not (cwd / "retrain.toml").exists():
        assert retrain("init", "--template", "tiny", cwd=cwd).code == 0
    outcome = retrain(*arguments, cwd=cwd)
    assert outcome.code == 0, outcome.err
    return outcome


def records(file: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file; NaN and infinity, which JSON does not have, are refused."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{file} holds {name}")

    return [json.loads(line, parse_constant=refuse) for line in file.read_text(encoding="utf-8").splitlines()]


def untimed(file: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl` without the fields that measure time."""
    return [{k: v for k, v in record.items() if not k.endswith(TIMING)} for record in records(file)]


def is_running(pid: int) -> bool:
    """True for a process that has not ended (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
