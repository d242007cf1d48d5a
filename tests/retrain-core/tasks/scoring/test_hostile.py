"""A thousand hostile completions: bounded time and memory, nothing hangs, each in exactly one outcome."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from retrain.kernel.types import Example, Outcome
from retrain.tasks.child.system import descendants
from retrain.tasks.scoring.service import ScoringService

Make = Callable[..., ScoringService]

TEXTS = ("9^{9^{9^9}}", "{" * 1000, "\\boxed{\\boxed{}}", "\0\ud800", "x" * 1_000_000, "\\boxed{" * 50_000, "7")
SLOW = ("sleep", "spin", "tower", "stop")  # each takes the time limit: few of them
SLOW_EACH, QUICK_EACH = 2, 4


@pytest.mark.long
def test_a_thousand_hostile_completions(service: Make, rewards: Any, example: Example) -> None:
    quick = [name for name in rewards.ATTACKS if name not in SLOW]
    texts = [f"{name} {n}" for name in SLOW for n in range(SLOW_EACH)]
    texts += [f"{name} {n}" for name in quick for n in range(QUICK_EACH)]
    texts += [f"{name} {n}" for name in rewards.HARMLESS for n in range(QUICK_EACH)]
    texts += [f"{TEXTS[n % len(TEXTS)]}{'' if n < len(TEXTS) else n}" for n in range(1000 - len(texts))]
    random.Random(0).shuffle(texts)
    hostile = service(rewards.Hostile(), workers=2, timeout_s=1.5, retries=0, max_failed_frac=1.0, memory_gb=2.0)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with hostile.batch() as batch:
        for text in texts:
            batch.submit(example, text)
        scores = batch.collect()
        metrics = batch.metrics()
    assert len(scores) == len(texts) == 1000
    for text, score in zip(texts, scores, strict=True):
        word = text.split(" ")[0]
        wanted = Outcome.FAILED if word in rewards.ATTACKS else Outcome.SCORED
        assert score.outcome is wanted, (text[:50], score)
        assert score.value == (None if word in rewards.ATTACKS else float(word in rewards.HARMLESS or text == "7"))
    assert metrics["timed_out_score_count"] == len(SLOW) * SLOW_EACH
    factor = 1024 if sys.platform == "darwin" else 1
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / factor / 1024
    assert grown_mb < 1500  # the texts of a step and their frames, nothing of what they make the reward do


@pytest.mark.slow
def test_details_say_what_happened(service: Make, rewards: Any, example: Example) -> None:
    hostile = service(rewards.Hostile(), timeout_s=1.0, retries=1, max_failed_frac=1.0)
    wanted = {
        "sleep": "timed out after 1 s",
        "kill": "the scoring process died with signal 9",
        "os_exit": "the scoring process exited with code 3",
        "exit": "SystemExit: 3",
        "interrupt": "KeyboardInterrupt",
        "allocate": "MemoryError",
        "none": "the reward returned None, not a number or a Score",
        "text": "the reward returned str '1.0', not a number or a Score",
        "set": "the reward returned set, not a number or a Score",
    }
    with hostile.batch() as batch:
        for word in wanted:
            batch.submit(example, word)
        assert [score.detail.partition(" (")[0] for score in batch.collect()] == list(wanted.values())


def test_nothing_is_left_when_the_service_is_closed(service: Make, rewards: Any, example: Example) -> None:
    before = descendants(os.getpid())
    hostile = service(rewards.Hostile(), workers=2, timeout_s=0.1, retries=0, max_failed_frac=1.0)
    with hostile.batch() as batch:
        for word in ("leave_process", "fork_and_hang", "fork_and_return", "sleep", "stop"):
            batch.submit(example, word)
        batch.collect()
    started = descendants(os.getpid()) - before
    assert started
    hostile.close()
    listed = subprocess.run(["ps", "-A", "-o", "pid=,pgid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    alive = {int(number) for *numbers, state in rows if not state.startswith("Z") for number in numbers}
    assert not alive & started
