"""Scoring processes, each driven by a thread of the run that kills it at the time limit and replaces it."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue

from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.contracts.tasks import Reward
from retrain.kernel.errors import RetrainError
from retrain.kernel.types import Example, Outcome, Score
from retrain.tasks.child.process import Child, ChildDied, ChildError, ChildFailure, ChildTimeout
from retrain.tasks.scoring.verdict import Scorers

# Each worker holds a copy of every reward, and of the libraries that rewards import.
MAX_WORKERS = 8
JOIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try: the score, the seconds that scoring took, and a traceback or the output of the process."""

    score: Score
    seconds: float = 0.0
    is_timeout: bool = False
    report: str = ""


NOT_TRIED = Attempt(score=Score.failed("not scored"))


@dataclass(slots=True, kw_only=True, eq=False)
class Task:
    """A text to be scored: put into `finished` after its last attempt, dropped if cancelled."""

    reward: int
    example: Example
    text: str
    limits: ScoringTable
    finished: SimpleQueue[Task] = field(repr=False)
    last: Attempt = NOT_TRIED
    attempts: int = 0
    is_cancelled: bool = False

    @property
    def score(self) -> Score:
        return self.last.score

    def settle(self, attempt: Attempt) -> bool:
        """Record an attempt; False when it failed and may be repeated, otherwise the task is finished."""
        if self.is_cancelled:
            return True
        self.last = attempt
        self.attempts += 1
        if attempt.score.outcome is Outcome.FAILED and self.attempts <= self.limits.retries:
            return False
        self.finished.put(self)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedReward:
    """A reward of a run under its name in the configuration, and its weight in the sum."""

    name: str
    reward: Reward
    weight: float = 1.0


class ScoringPool:
    """Processes that hold all synchronous rewards of a run; tasks start in order, and finish in any order."""

    def __init__(self, rewards: Mapping[int, Reward], *, workers: int, memory_gb: float) -> None:
        scorers = Scorers(rewards)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        # One core is left to the run, to tokenise and train.
        count = workers or min(MAX_WORKERS, max(1, cores - 1))
        self._children = [Child(scorers, memory_gb=memory_gb, name="scoring") for _ in range(count)]
        self._running: list[Task | None] = [None] * count
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_closing = False

    def launch(self) -> None:
        self._children[0].launch()

    def start(self) -> None:
        if self._threads:
            return
        self._is_closing = False
        self._tasks = SimpleQueue()
        # Here and not in a thread: a reward that cannot be prepared has to end `start` with its error.
        self._children[0].start()
        for number in range(len(self._children)):
            thread = threading.Thread(target=self._drive, args=(number,), name=f"scoring-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def submit(self, task: Task) -> None:
        self._tasks.put(task)

    def drop_cancelled(self) -> None:
        """End the processes that work on a cancelled task; queued tasks are skipped when their turn comes."""
        for child, task in zip(self._children, self._running, strict=True):
            if task is not None and task.is_cancelled:
                child.kill()

    def close(self) -> None:
        threads, self._threads = self._threads, []
        self._is_closing = True
        for _ in threads:
            self._tasks.put(None)
        for task in self._running:
            if task is not None:
                task.is_cancelled = True
        for child in self._children:
            child.kill()
        for thread in threads:
            thread.join(JOIN_S)
        for child in self._children:
            # A thread may have started it again between the first kill and the join.
            child.kill()

    def _drive(self, number: int) -> None:
        child = self._children[number]
        while (task := self._tasks.get()) is not None and not self._is_closing:
            self._running[number] = task
            if not task.is_cancelled and not task.settle(_attempt(child, task)):
                self._tasks.put(task)
            self._running[number] = None


def _attempt(child: Child, task: Task) -> Attempt:
    """Try once. A process that was gone before the try began is replaced once more, for the text is not to blame."""
    attempt = _try(child, task)
    return attempt if attempt is not None else _try(child, task, is_last=True) or _not_started("it died at once")


def _try(child: Child, task: Task, *, is_last: bool = False) -> Attempt | None:
    timeout_s = task.limits.timeout_s
    try:
        if not child.is_running:
            child.start()
    except (ChildFailure, RetrainError, OSError) as error:
        return _not_started(str(error), report=getattr(error, "output", "") or getattr(error, "traceback", ""))
    if task.is_cancelled:  # while the process started
        return NOT_TRIED
    try:
        score = child.call("score", task.reward, task.example, task.text, timeout_s=timeout_s)
        return Attempt(score=score, seconds=child.seconds)
    except ChildTimeout as error:
        return Attempt(score=Score.failed(str(error)), seconds=timeout_s, is_timeout=True)
    except ChildDied as error:
        if not error.has_started and not is_last:
            return None
        return Attempt(score=Score.failed(str(error)), report=error.output)
    except ChildError as error:
        return Attempt(score=Score.failed(str(error)), seconds=child.seconds, report=error.traceback)
    except Exception as error:  # an error meant for users, or an example that cannot be sent
        return Attempt(score=Score.failed(f"{type(error).__name__}: {error}"), seconds=child.seconds)


def _not_started(why: str, report: str = "") -> Attempt:
    return Attempt(score=Score.failed(f"the scoring process could not be started: {why}"), report=report)
