"""A run that is killed at a chosen instant, and the comparison with the same run left alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from retrain.records.checkpoints import checkpoint_folders, read_checkpoint
from tests.end_to_end.preloaded import popen
from tests.end_to_end.running import SCRIPT, retrain, untimed
from tests.kit.shared import made_once

RUN = ("--max-steps", "6", "--save-every", "1", "--batch-size", "4", "--group-size", "8", "--max-tokens", "24")
EVALS = ("--eval-examples", "4", "--eval-every", "2", "--eval-samples", "2", "--sepa-delay-steps", "1", "--seed", "3")
ONE_CORE = {"OMP_NUM_THREADS": "1"}  # runs are killed two at a time
BASE = (*RUN, *EVALS)
STREAMS = ("emergence/generations.jsonl", "emergence/steps.jsonl")

KILL_AT = """
import os, signal, sys
from pathlib import Path

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

{patch}
from retrain.cli.command_line import main
main(sys.argv[1:])
"""


def start(*arguments: str, cwd: Path, patch: str = "") -> subprocess.Popen[str]:
    """The script in a process of its own, with torch in it; `patch` is run before retrain is imported and may call
    `kill()`."""
    program = [sys.executable, "-c", KILL_AT.format(patch=patch)] if patch else [str(SCRIPT)]
    return popen([*program, *arguments], cwd=cwd, env={**os.environ, **ONE_CORE})


def left_alone(factory: pytest.TempPathFactory, name: str, *arguments: str) -> Path:
    """A folder with a configuration and `never`, the run of these arguments that nothing disturbs; made once."""

    def make(folder: Path) -> None:
        assert retrain("init", "--template", "tiny", cwd=folder).code == 0
        code, _, err = finish(start(*arguments, "--log-dir", "never", cwd=folder))
        assert code == 0, err

    return made_once(factory, name, make)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code and output, when it has ended."""
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def arguments_for(run: Path, base: Sequence[str]) -> Sequence[str]:
    """The command line that continues: a resume, or the same again if it died before there was a run."""
    if (run / "run.json").exists():
        return ("--resume", str(run))
    return (*base, "--log-dir", str(run))


def wait_for(process: subprocess.Popen[str], condition: Path) -> None:
    """Until a file is there, or the process is gone."""
    while not condition.exists() and process.poll() is None:
        time.sleep(0.005)


def check_nothing_is_half_written(run: Path) -> None:
    """Every checkpoint that can be seen is whole."""
    for path in checkpoint_folders(run / "adapter"):
        if not path.name.startswith("."):
            read_checkpoint(path)


def check_same(run: Path, wanted: Path) -> None:
    """Byte for byte the run that was never interrupted, apart from time."""
    for name in (*STREAMS, *(["eval.jsonl"] if (wanted / "eval.jsonl").exists() else [])):
        assert (run / name).read_bytes() == (wanted / name).read_bytes(), name
    assert untimed(run / "metrics.jsonl") == untimed(wanted / "metrics.jsonl")
    assert contents(run / "emergence/tokens") == contents(wanted / "emergence/tokens")
    ours, theirs = contents(run / "adapter/final"), contents(wanted / "adapter/final")
    for name in ("adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "backend_state.json"):
        assert ours[name] == theirs[name], name


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def killed_and_resumed(factory: pytest.TempPathFactory, name: str, folder: Path, patch: str, *arguments: str) -> Path:
    """The folder of a run that `patch` kills and that is resumed: it must be the run `name` that was left alone."""
    wanted = left_alone(factory, name, *arguments)
    (folder / "retrain.toml").write_bytes((wanted / "retrain.toml").read_bytes())
    code, _, _ = finish(start(*arguments, "--log-dir", "killed", cwd=folder, patch=patch))
    assert code == -9
    check_nothing_is_half_written(folder / "killed")
    code, _, err = finish(start("--resume", "killed", cwd=folder))
    assert code == 0, err
    check_same(folder / "killed", wanted / "never")
    return folder / "killed"
