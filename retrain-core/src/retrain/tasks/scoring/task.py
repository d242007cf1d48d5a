"""One text to be scored by one reward: its limits, its attempts, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from queue import SimpleQueue

from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.types import Example, Outcome, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one reward: seconds per score, retries of a failed score, share of a step's scores that may fail."""

    timeout_s: float
    retries: int
    max_failed_frac: float


def limits_of(settings: ScoringTable, name: str) -> Limits:
    """The limits of `[scoring]`, overridden by `[scoring.limits.NAME]`."""
    own = settings.limits.get(name)
    given = own.model_dump(exclude_none=True) if own else {}
    return Limits(
        timeout_s=given.get("timeout_s", settings.timeout_s),
        retries=given.get("retries", settings.retries),
        max_failed_frac=given.get("max_failed_frac", settings.max_failed_frac),
    )


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
    """Goes to a scorer, and into `finished` after its last attempt; a cancelled task is dropped.

    Until it is finished, only its scorer's thread writes to it.
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
        """Record an attempt; False when it failed and may be repeated, otherwise the task is finished."""
        if self.is_cancelled:
            return True
        self.last = attempt
        self.attempts += 1
        if attempt.score.outcome is Outcome.FAILED and self.attempts <= self.limits.retries:
            return False
        self.finished.put(self)
        return True
