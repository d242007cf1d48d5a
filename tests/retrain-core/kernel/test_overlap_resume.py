"""A run with overlap, stopped or broken anywhere, continues like a run that was never interrupted."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.overlapped import ACTING, act, outcome, steps
from tests.kit.shared import slow_or_long

Command = Callable[..., Any]
Run = Callable[..., Any]
PLACES = [("eval", -1), ("eval", 1), ("eval", 4), ("checkpoint", 2)]
PLACES += [(phase, step) for phase in ("sampling", "scoring", "training", "recording") for step in (0, 1, 2, 4)]
CASES = [(*place, "SIGTERM") for place in PLACES]
CASES += [
    (*place, "raise") for place in (("sampling", 2), ("scoring", 4), ("training", 2), ("recording", 1), ("eval", 1))
]
TIMEOUT_S = 30


@pytest.mark.long
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("half", ["train", "sample"])
def test_a_stop_in_either_half_can_be_resumed_to_the_same_run(
    run_overlapped: Run, command: Command, disturbed: Any, tmp_path: Path, half: str, after: bool
) -> None:
    """Before or `after` the other half has ended; an update still under way is not made."""
    arguments = ("--eval-examples", "2", "--eval-every", "2")
    assert run_overlapped("--log-dir", "never", *arguments).code == 0
    sampled = threading.Event()

    def stop(backend: Any, what: Any) -> None:
        if half == "train" and what.step == 2:
            if after:
                sampled.wait(TIMEOUT_S)
                time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        if half == "sample" and backend.sampler.version == 2 and len(what) == 4:
            while after and backend.trained < 3:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)

    def other(backend: Any, what: Any) -> None:
        if half == "train" and backend.sampler.version == 2:
            sampled.set()

    setattr(disturbed, half, stop)
    if half == "train":
        disturbed.sample = other
    result = run_overlapped("--log-dir", "stopped", "--grace-s", "60", *arguments)
    assert result.code == 75, result.err
    (checkpoint,) = (tmp_path / "stopped/adapter").iterdir()
    steps_in_it = json.loads((checkpoint / "trained.json").read_text())
    before = json.loads((checkpoint / "before.json").read_text())
    assert before[0] == steps_in_it - 1
    if half == "train" or after:
        assert steps_in_it == (2 if half == "train" else 3)
    disturbed.train = disturbed.sample = lambda backend, what: None
    assert command("--resume", "stopped").code == 0
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "never")


@pytest.mark.parametrize(("phase", "step", "action"), slow_or_long(CASES, ("scoring", 4, "raise")))
def test_stopped_or_broken_in_any_phase_it_continues_as_the_same_run(
    run_overlapped: Run,
    command: Command,
    distribution: Callable[..., Path],
    tmp_path: Path,
    phase: str,
    step: int,
    action: str,
) -> None:
    distribution("retrain-acting", {"acting": ACTING})
    arguments = ("--eval-examples", "2", "--eval-every", "2", "--save-every", "2")
    assert run_overlapped("--log-dir", "never", *arguments).code == 0
    act(tmp_path, phase, step, action=action)
    result = run_overlapped("--log-dir", "stopped", *arguments)
    assert result.code == (75 if action == "SIGTERM" else 1), result.err
    assert not (tmp_path / "act.json").exists()
    assert command("--resume", "stopped").code == 0
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "never")


@pytest.mark.long
def test_episodes_overlap_training_too(run_overlapped: Run, command: Command, disturbed: Any, tmp_path: Path) -> None:
    turns = ("--environment-provider", "toy_turns", "--eval-examples", "2", "--eval-every", "2")
    assert run_overlapped("--log-dir", "never", *turns).code == 0
    assert [line["staleness_max"] for line in steps(tmp_path / "never")] == [0, 1, 1, 1, 1]
    asked: list[int] = []

    def stop(backend: Any, requests: Any) -> None:
        if backend.sampler.version == 2:
            asked.append(len(requests))
            if len(asked) == 2:  # in the middle of the episodes
                os.kill(os.getpid(), signal.SIGTERM)

    disturbed.sample = stop
    assert run_overlapped("--log-dir", "stopped", *turns).code == 75
    disturbed.sample = lambda backend, what: None
    assert command("--resume", "stopped").code == 0
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "never")
