"""The scores of one step: texts are submitted one by one, and their scores collected together, in that order."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from retrain.kernel.errors import Problem, RewardError
from retrain.kernel.types import Example, Outcome, Score
from retrain.tasks.scoring.pool import Attempt, Task
from retrain.tasks.scoring.verdict import combined, next_step, part_means
from retrain.text.secrets import hide_text
from retrain.text.terminal_text import printable

if TYPE_CHECKING:
    from retrain.tasks.scoring.service import ScoringService

LOG = logging.getLogger("retrain")
POLL_S = 0.5  # between two looks at the event loop's heartbeat
RESTS = Attempt(score=Score.failed("not tried: nothing could be scored in the last batches"))
MAX_ENTRIES = 2**14  # about 500 bytes each

Key = tuple[int, str, bytes]


def key_of(reward: int, example: Example, text: str) -> Key:
    """Equal for equal scores: the reward, the example's id, and a digest of the text."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return reward, example.id, digest


class VerdictCache:
    """The most recently used verdicts; failures are not kept, since they may be temporary.

    It only saves work: no score or metric may depend on it, or a resumed run, whose cache is empty, would differ.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._scores: OrderedDict[Key, Score] = OrderedDict()

    def get(self, key: Key) -> Score | None:
        """The verdict, None when there is none."""
        score = self._scores.get(key)
        if score is not None:
            self._scores.move_to_end(key)
        return score

    def put(self, key: Key, score: Score) -> None:
        """Keep a verdict, unless it is a failure."""
        if score.outcome is Outcome.FAILED:
            return
        self._scores[key] = score
        self._scores.move_to_end(key)
        if len(self._scores) > self._max_entries:
            self._scores.popitem(last=False)


class ScoringBatch:
    """Made by `ScoringService.batch`: `submit` while sampling, `collect` once, and then `seconds` and `metrics`.

    With a cache, equal texts to one example are scored once; without one, each is scored again. A `shadow` scores the
    same texts, and its scores are the `shadow` of each score: its failures are warned of and fail nothing, and neither
    budget nor seconds nor metrics count it.
    """

    def __init__(
        self,
        service: ScoringService,
        *,
        label: str,
        failures: Path | None,
        fresh: bool,
        shadow: ScoringBatch | None,
        rests: bool,
    ) -> None:
        self._service, self._shadow, self._rests = service, shadow, rests
        self._cache = None if fresh else service.cache
        self._label, self._failures = label, failures
        self._finished: SimpleQueue[Task] = SimpleQueue()
        self._submitted: list[tuple[Task, ...]] = []
        self._by_key: dict[Key, Task] = {}
        self._outstanding: set[Task] = set()
        self._tried: list[Task] = []

    def submit(self, example: Example, text: str) -> int:
        """Start scoring a completion, without waiting; returns the index of its score in the result of `collect`."""
        self._submitted.append(tuple(self._task(n, example, text) for n in range(len(self._service.rewards))))
        if self._shadow is not None:
            self._shadow.submit(example, text)
        return len(self._submitted) - 1

    @property
    def num_outstanding(self) -> int:
        """Scores that are still being worked out; equal texts count once if there is a cache, several rewards each."""
        return len(self._outstanding)

    def collect(
        self, *, within_budget: bool = True, count: Callable[[int], None] = lambda finished: None
    ) -> list[Score]:
        """Wait for all scores, and return them in the order of submission; `count(1)` is called for each that comes.

        With several rewards a score is their weighted sum, and its `parts` their own values. RewardError when more than
        `max_failed_frac` of a reward's scores failed (exactly that share is still allowed; not checked without
        `within_budget`), or when an asynchronous reward blocks the event loop. An exception that a signal handler
        raises ends the wait.
        """
        blocked_at = ""
        while self._outstanding and not blocked_at:
            try:
                self._outstanding.discard(self._finished.get(timeout=POLL_S))
                count(1)
            except Empty:
                blocked_at = self._service.blocked_at()
        if blocked_at:
            self._give_up_async(blocked_at)
            self.collect(within_budget=False)
            raise RewardError(self._blocked(blocked_at))
        if self._cache is not None:
            for key, task in self._by_key.items():
                self._cache.put(key, task.score)
        if self._failures is not None:
            self._keep_failures(self._failures)
        if within_budget:
            self._check_budget()
        scores = self._combined()
        if self._shadow is None:
            return scores
        return [replace(s, shadow=of_shadow) for s, of_shadow in zip(scores, self._shadow.tolerated(), strict=True)]

    def tolerated(self) -> list[Score]:
        """The scores of a shadow: failures end nothing. A warning says where those of a reward would."""
        try:
            scores = self.collect(within_budget=False)
        except RewardError as error:  # it blocks the event loop; all its scores have failed by now
            LOG.warning("the shadow: %s", error.problems[0].what)
            scores = self.collect(within_budget=False)
        failed = [score.detail for score in scores if score.outcome is Outcome.FAILED]
        if len(failed) > self._service.limits[0].max_failed_frac * len(scores):
            text, first = "shadow %r failed on %d of %d completions; first: %s", printable(hide_text(failed[0]))
            LOG.warning(text, self._service.names[0], len(failed), len(scores), first)
        return scores

    @property
    def is_lost(self) -> bool:
        """Whether every text failed, and there was one."""
        outcomes = {task.score.outcome for tasks in self._submitted for task in tasks}
        return outcomes == {Outcome.FAILED}

    @property
    def seconds(self) -> list[float]:
        """Seconds that the rewards took for each submission, queueing not counted; 0 for a score from the cache."""
        return [math.fsum(task.last.seconds for task in tasks) for tasks in self._submitted]

    def metrics(self) -> dict[str, float]:
        """Fields for the step's line: `timed_out_score_count`, `score_mean_time_s`, `score_max_time_s`.

        With several rewards, or one whose scores have parts, also `reward_<name>_mean`, over the completions for which
        that reward has a verdict, and the fields of asynchronous rewards; `shadow_...` are those of a shadow.
        """
        fields = part_means(self._combined())
        fields["timed_out_score_count"] = sum(task.last.is_timeout for tasks in self._submitted for task in tasks)
        seconds = [task.last.seconds for task in self._tried]
        fields["score_mean_time_s"] = math.fsum(seconds) / len(seconds) if seconds else 0.0
        fields["score_max_time_s"] = max(seconds, default=0.0)
        of_shadow = self._shadow._service.reward_metrics() if self._shadow is not None else {}
        fields |= {f"shadow_{name}": value for name, value in of_shadow.items()}
        return fields | self._service.reward_metrics()

    def cancel(self) -> None:
        """Drop outstanding scores, if there are any."""
        if not self._outstanding:
            return
        for task in self._outstanding:
            task.is_cancelled = True
        self._outstanding.clear()
        self._service.drop_cancelled()

    def _combined(self) -> list[Score]:
        names, weights = self._service.names, [reward.weight for reward in self._service.rewards]
        return [combined([task.score for task in tasks], names, weights) for tasks in self._submitted]

    def _task(self, number: int, example: Example, text: str) -> Task:
        key = key_of(number, example, text)
        known = self._by_key.get(key) if self._cache is not None else None
        if known is not None:
            return known
        limits = self._service.limits[number]
        task = Task(reward=number, example=example, text=text, limits=limits, finished=self._finished)
        self._by_key[key] = task
        verdict = self._cache.get(key) if self._cache is not None else None
        if verdict is not None:
            task.last = Attempt(score=verdict)
        elif self._rests and self._tried:
            task.last = RESTS
        else:
            self._tried.append(task)
            self._outstanding.add(task)
            self._service.submit(task)
        return task

    def _check_budget(self) -> None:
        problems = []
        kept = self._failures
        for number, (name, limits) in enumerate(zip(self._service.names, self._service.limits, strict=True)):
            tasks = [each[number] for each in self._submitted]
            failed = [task for task in tasks if task.score.outcome is Outcome.FAILED]
            if len(failed) > limits.max_failed_frac * len(tasks):
                first = f"{failed[0].score.detail}, on example {failed[0].example.id}"
                what = f"reward {name!r} failed on {len(failed)} of {len(tasks)} completions; first: {first}"
                why = f"more than max_failed_frac = {limits.max_failed_frac:g} of them"
                why += f"; the texts are in {kept}" if kept else ""
                fix = next_step(failed[0].score.detail, name) or "repair the reward or its data"
                fix += f" (`retrain audit --replay {kept}` scores them again)" if kept else ""
                fix += ", or raise [scoring] max_failed_frac"
                problems.append(Problem(where="scoring", what=what, why=why, fix=fix))
        if problems:
            raise RewardError(*problems)

    def _give_up_async(self, where: str) -> None:
        """Fail the scores in the event loop; its thread cannot be ended, so a new loop will replace it."""
        for task in [task for task in self._outstanding if self._service.is_async(task.reward)]:
            task.is_cancelled = True
            task.last = Attempt(score=Score.failed(f"the event loop is blocked at {where}"), is_timeout=True)
            self._outstanding.discard(task)
        self._service.abandon_loop()

    def _blocked(self, where: str) -> Problem:
        names = ", ".join(repr(name) for n, name in enumerate(self._service.names) if self._service.is_async(n))
        what = f"an `async def score` ({names}) blocks instead of awaiting, at {where}"
        fix = "await there, or make it a plain `def score`, which runs in a process that can be killed"
        return Problem(where="scoring", what=what, why="it cannot be cancelled at its time limit", fix=fix)

    def _keep_failures(self, folder: Path) -> None:
        """Write the texts that failed, replacing those of an earlier attempt; one warning once the folder is full."""
        counts = Counter(task for tasks in self._submitted for task in tasks)
        failed = [task for task in counts if task.score.outcome is Outcome.FAILED]
        if not failed and not folder.is_dir():
            return
        from retrain.tasks.scoring.failures import MAX_FILES, FailureRecord, write_failures

        records = [
            FailureRecord(
                reward=self._service.names[task.reward],
                weight=self._service.rewards[task.reward].weight,
                example=task.example,
                text=task.text,
                detail=task.score.detail,
                attempts=task.attempts,
                seconds=task.last.seconds,
                count=counts[task],
                report=task.last.report,
            )
            for task in failed
        ]
        if not write_failures(folder, self._label, records) and not self._service.has_told_full:
            self._service.has_told_full = True
            LOG.warning("%s holds %d failed scores; no more are kept", folder, MAX_FILES)
