"""A run that is killed at a chosen instant, and the comparison with the same run left alone."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from retrain.records.checkpoints import checkpoint_folders, read_checkpoint
from tests.end_to_end.preloaded import popen
from tests.end_to_end.running import SCRIPT, records, retrain, untimed
from tests.kit.shared import made_once

RUN = ("--max-steps", "6", "--save-every", "1", "--batch-size", "4", "--group-size", "8", "--max-tokens", "24")
EVALS = ("--eval-examples", "4", "--eval-every", "2", "--eval-samples", "2", "--sepa-delay-steps", "1", "--seed", "3")
ONE_CORE = {"OMP_NUM_THREADS": "1"}  # runs are killed two at a time
BASE = (*RUN, *EVALS)
STREAMS = ("emergence/generations.jsonl", "emergence/steps.jsonl")

KILL_AT = """
import os, signal, sys, time
from pathlib import Path

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def at(owner, name, act, is_time=lambda *_: True, after=False):
    # `act` comes before a function is called, or after it, when `is_time` says so of its arguments.
    original = getattr(owner, name)
    def call(*args, **more):
        is_now = is_time(*args)
        is_now and not after and act(*args)
        done = original(*args, **more)
        is_now and after and act(*args)
        return done
    setattr(owner, name, call)

def nth(number, counts=lambda *_: True):
    seen = []
    return lambda *args: bool(counts(*args) and not seen.append(1) and len(seen) == number)

{patch}
from retrain.cli.command_line import main
main(sys.argv[1:])
"""


def start(*arguments: str, cwd: Path, patch: str = "") -> subprocess.Popen[str]:
    """The script in a process that has torch; `patch` runs before it, with the helpers of `KILL_AT`."""
    program = [sys.executable, "-c", KILL_AT.format(patch=patch)] if patch else [str(SCRIPT)]
    return popen([*program, *arguments], cwd=cwd, env={**os.environ, **ONE_CORE})


def left_alone(factory: pytest.TempPathFactory, name: str, *arguments: str) -> Path:
    """A folder with a configuration and `never`, the run of these arguments that nothing disturbs; made once."""

    def make(folder: Path) -> None:
        assert retrain("init", "--template", "tiny", cwd=folder).code == 0
        code, _, err = finish(start(*arguments, "--log-dir", "never", cwd=folder))
        assert code == 0, err

    return made_once(factory, name, make)


def waiting(*arguments: str, cwd: Path, patch: str, mark: Path) -> subprocess.Popen[str]:
    """A run that has come to the place where its patch touches `mark`, which it knows as `{mark!r}`."""
    process = start(*arguments, cwd=cwd, patch=patch.replace("{mark!r}", repr(str(mark))))
    wait_for(process, mark)
    if not mark.exists():
        pytest.fail(finish(process)[2])
    return process


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def arguments_for(run: Path, base: Sequence[str]) -> Sequence[str]:
    """The command line that continues: a resume, or the same again if it died before there was a run."""
    if (run / "run.json").exists():
        return ("--resume", str(run))
    return (*base, "--log-dir", str(run))


def complete(work: Path, run: Path, base: Sequence[str]) -> None:
    """Continue to the end; then it must be the run that was left alone."""
    code, _, err = finish(start(*arguments_for(run, base), cwd=work))
    assert code == 0, err
    check_same(run, work / "never")


def check_chains_of_kills(work: Path, base: Sequence[str], *, seed: int, most: int, in_a_row: int) -> None:
    """Runs, two at a time, are killed at random instants `in_a_row` times and completed, until `most` were killed."""
    lines = records(work / "never/metrics.jsonl")
    stepping_s = sum(line.get("step_time_s", 0.0) + line.get("eval_time_s", 0.0) for line in lines)

    def chain(worker: int) -> int:
        chooser, kills = random.Random(seed + worker), 0
        while kills < most / 2:
            run = work / f"killed-{worker}-{kills}"
            for _ in range(in_a_row):
                process = start(*arguments_for(run, base), cwd=work)
                if chooser.random() < 0.85:  # mostly once the run is there
                    wait_for(process, run / "run.json")
                    time.sleep(chooser.uniform(0.0, 0.7 * stepping_s))
                else:
                    time.sleep(chooser.uniform(0.0, 5.0))
                process.kill()
                finish(process)
                kills += process.returncode < 0
                check_nothing_is_half_written(run)
            complete(work, run, base)
        return kills

    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(chain, range(2))) >= most


def wait_for(process: subprocess.Popen[str], condition: Path) -> None:
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
