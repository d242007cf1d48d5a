"""A run with overlap, stopped or broken anywhere, continues like a run that was never interrupted."""

from __future__ import annotations

import os
import signal
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
