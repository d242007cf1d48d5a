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

from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.errors import RewardError
from retrain.kernel.types import Example, Outcome, Score
from retrain.tasks.scoring.pool import Attempt, Task
from retrain.tasks.scoring.verdict import combined, part_means

if TYPE_CHECKING:
    from retrain.tasks.scoring.service import ScoringService

LOG = logging.getLogger("retrain")
POLL_S = 0.5  # between two looks at the event loop's heartbeat
RESTS = Attempt(score=Score.failed("not tried: nothing could be scored in the last batches"))
MAX_ENTRIES = 2**14  # about 500 bytes each

Key = tuple[int, str, bytes]


def key_of(reward: int, example: Example, text: str) -> Key:
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
        if key in self._scores:
            self._scores.move_to_end(key)
        return self._scores.get(key)

    def put(self, key: Key, score: Score) -> None:
        if score.outcome is not Outcome.FAILED:
            self._scores[key] = score
            self._scores.move_to_end(key)
            if len(self._scores) > self._max_entries:
                self._scores.popitem(last=False)


class ScoringBatch:
    """Made by `ScoringService.batch`: `submit` while sampling, `collect` once, and then `seconds` and `metrics`.

    With a cache, equal texts to one example are scored once. A `shadow` scores the same texts, and its scores become
    the `shadow` of each score: its failures only warn, and budget, seconds and metrics do not count it.
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
        self.service, self._shadow, self._rests = service, shadow, rests
        self._cache = None if fresh else service.cache
        self._label, self._failures = label, failures
        self._finished: SimpleQueue[Task] = SimpleQueue()
        self._submitted: list[tuple[Task, ...]] = []
        self._by_key: dict[Key, Task] = {}
        self._outstanding: set[Task] = set()
        self._tried: list[Task] = []

    def submit(self, example: Example, text: str) -> int:
        """Start scoring a completion, without waiting; returns the index of its score in the result of `collect`."""
        self._submitted.append(tuple(self._task(n, example, text) for n in range(len(self.service.rewards))))
        if self._shadow is not None:
            self._shadow.submit(example, text)
        return len(self._submitted) - 1

    @property
    def num_outstanding(self) -> int:
        return len(self._outstanding)

    def collect(
        self, *, within_budget: bool = True, count: Callable[[int], None] = lambda finished: None
    ) -> list[Score]:
        """Wait for all scores, and return them in the order of submission; `count(1)` is called for each that comes.

        With several rewards a score is their weighted sum, and its `parts` their own values. RewardError when more than
        `max_failed_frac` of a reward's scores failed (exactly that share is allowed; not checked without
        `within_budget`), or when an asynchronous reward blocks the event loop. An exception that a signal handler
        raises ends the wait.
        """
        while self._outstanding:
            try:
                self._outstanding.discard(self._finished.get(timeout=POLL_S))
                count(1)
            except Empty:
                asynchronous = self.service.asynchronous
                if asynchronous is not None and (where := asynchronous.blocked_at()):
                    problem = asynchronous.give_up(self._outstanding, where)
                    self.collect(within_budget=False)
                    raise RewardError(problem) from None
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
        from retrain.tasks.scoring.failures import tolerated

        return [replace(s, shadow=of_shadow) for s, of_shadow in zip(scores, tolerated(self._shadow), strict=True)]

    @property
    def is_lost(self) -> bool:
        outcomes = {task.score.outcome for tasks in self._submitted for task in tasks}
        return outcomes == {Outcome.FAILED}

    @property
    def seconds(self) -> list[float]:
        """Seconds that the rewards took for each submission, queueing not counted; 0 for a score from the cache."""
        return [math.fsum(task.last.seconds for task in tasks) for tasks in self._submitted]

    def metrics(self) -> dict[str, float]:
        """Return the fields `timed_out_score_count`, `score_mean_time_s` and `score_max_time_s` for the step's line.

        With several rewards, or one whose scores have parts, also `reward_<name>_mean`, over the completions for which
        that reward has a verdict, and the fields of asynchronous rewards; `shadow_...` are a shadow's.
        """
        fields = part_means(self._combined())
        fields["timed_out_score_count"] = sum(task.last.is_timeout for tasks in self._submitted for task in tasks)
        seconds = [task.last.seconds for task in self._tried]
        fields["score_mean_time_s"] = math.fsum(seconds) / len(seconds) if seconds else 0.0
        fields["score_max_time_s"] = max(seconds, default=0.0)
        of_shadow = self._shadow.service.reward_metrics() if self._shadow is not None else {}
        fields |= {f"shadow_{name}": value for name, value in of_shadow.items()}
        return fields | self.service.reward_metrics()

    def cancel(self) -> None:
        if not self._outstanding:
            return
        for task in self._outstanding:
            task.is_cancelled = True
        self._outstanding.clear()
        self.service.drop_cancelled()

    def _combined(self) -> list[Score]:
        names, weights = self.service.names, [reward.weight for reward in self.service.rewards]
        return [combined([task.score for task in tasks], names, weights) for tasks in self._submitted]

    def _task(self, number: int, example: Example, text: str) -> Task:
        key = key_of(number, example, text)
        known = self._by_key.get(key) if self._cache is not None else None
        if known is not None:
            return known
        limits = self.service.limits[number]
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
            self.service.submit(task)
        return task

    def _check_budget(self) -> None:
        over: list[tuple[str, ScoringTable, list[Task]]] = []
        for number, (name, limits) in enumerate(zip(self.service.names, self.service.limits, strict=True)):
            failed = [tasks[number] for tasks in self._submitted if tasks[number].score.outcome is Outcome.FAILED]
            if len(failed) > limits.max_failed_frac * len(self._submitted):
                over.append((name, limits, failed))
        if over:
            from retrain.tasks.scoring.failures import over_budget

            total, kept = len(self._submitted), self._failures
            raise RewardError(*(over_budget(*each, total=total, kept=kept) for each in over))

    def _keep_failures(self, folder: Path) -> None:
        """Write the texts that failed, replacing files of an earlier attempt; one warning once the folder is full."""
        counts = Counter(task for tasks in self._submitted for task in tasks)
        failed = {task: count for task, count in counts.items() if task.score.outcome is Outcome.FAILED}
        if not failed and not folder.is_dir():
            return
        from retrain.tasks.scoring.failures import MAX_FILES, records_of, write_failures

        records = records_of(failed, self.service.rewards)
        if not write_failures(folder, self._label, records) and not self.service.has_told_full:
            self.service.has_told_full = True
            LOG.warning("%s holds %d failed scores; no more are kept", folder, MAX_FILES)
