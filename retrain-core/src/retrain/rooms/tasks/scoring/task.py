"""One text to be judged by one reward: what was asked, what came of it, and how often it may be tried."""

from __future__ import annotations

from dataclasses import dataclass, field
from queue import SimpleQueue

from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.types import Example, Outcome, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one reward may do: seconds for a score, further tries of one that failed, share of a step that may fail."""

    timeout_s: float
    retries: int
    max_failed_frac: float


def limits_of(settings: ScoringTable, name: str) -> Limits:
    """`[scoring]`, with what `[scoring.limits.NAME]` says instead."""
    own = settings.limits.get(name)
    given = own.model_dump(exclude_none=True) if own else {}
    return Limits(
        timeout_s=given.get("timeout_s", settings.timeout_s),
        retries=given.get("retries", settings.retries),
        max_failed_frac=given.get("max_failed_frac", settings.max_failed_frac),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try: the score, the seconds of the scorer itself, and what the process or traceback told besides."""

    score: Score
    seconds: float = 0.0
    is_timeout: bool = False
    report: str = ""


NOT_TRIED = Attempt(score=Score.failed("not scored"))


@dataclass(slots=True, kw_only=True, eq=False)
class Task:
    """Goes to a scorer, and into `finished` when it has its last attempt; a cancelled one goes nowhere.

    Only its scorer's thread writes to it until it is finished.
    """

    reward: int
    example: Example
    text: str
    limits: Limits
    finished: SimpleQueue[Task] = field(repr=False)
    last: Attempt = NOT_TRIED
    attempts: int = 0
    is_cancelled: bool = False

    @property
    def score(self) -> Score:
        """The outcome of the last attempt."""
        return self.last.score

    def settle(self, attempt: Attempt) -> bool:
        """Take an attempt; False when it failed and may be tried again, else the task is finished."""
        if self.is_cancelled:
            return True
        self.last = attempt
        self.attempts += 1
        if attempt.score.outcome is Outcome.FAILED and self.attempts <= self.limits.retries:
            return False
        self.finished.put(self)
        return True
