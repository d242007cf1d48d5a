"""The rewards of a run at work: completions are scored while others are still being sampled.

The texts of one step are submitted one by one, and their scores collected together, in that order.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.errors import PluginError, Problem, RewardError
from retrain.kernel.types import Example, Outcome, Score
from retrain.tasks.child.process import ChildError, ChildFailure
from retrain.tasks.scoring.pool import Attempt, NamedReward, ScoringPool, Task
from retrain.tasks.scoring.verdict import combined, part_means
from retrain.text.secrets import hide_text
from retrain.text.terminal_text import printable

if TYPE_CHECKING:
    from retrain.tasks.scoring.event_loop import AsyncRewards

LOG = logging.getLogger("retrain")
POLL_S = 0.5  # between two looks at the event loop's heartbeat
RESTS = Attempt(score=Score.failed("not tried: nothing could be scored in the last batches"))
# About 500 bytes each, so 8 MB at most.
MAX_ENTRIES = 2**14
MOST_LOST = 3


class ScoringService(AbstractContextManager["ScoringService"]):
    """The rewards of a run with their limits: `with service.batch() as batch`, `batch.submit(...)`, `batch.collect()`.

    Synchronous rewards run, pickled, in a pool of processes, each held to its memory and each score to its time; those
    with `async def score` in an event loop of this process. Scores do not depend on the number of workers.
    """

    def __init__(
        self, rewards: Sequence[NamedReward], settings: ScoringTable, *, shadow: ScoringService | None = None
    ) -> None:
        self.rewards = tuple(rewards)
        self.names = tuple(each.name for each in rewards)
        own = {name: table.model_dump(exclude_none=True) for name, table in settings.limits.items()}
        self.limits = tuple(settings.model_copy(update=own.get(name)) for name in self.names)
        self.shadow = shadow
        self.cache = VerdictCache() if settings.cache else None
        self.has_told_full = False  # that a folder takes no more failed scores
        self._lost_batches = 0  # in a row, in which the shadow failed on every text
        numbered = dict(enumerate(each.reward for each in rewards))
        own_loop = {n: reward for n, reward in numbered.items() if inspect.iscoroutinefunction(reward.score)}
        sync = {n: reward for n, reward in numbered.items() if n not in own_loop}
        self._memory_gb = settings.memory_gb
        self._pool = ScoringPool(sync, workers=settings.workers, memory_gb=settings.memory_gb) if sync else None
        self.asynchronous: AsyncRewards | None = None
        if own_loop:
            from retrain.tasks.scoring.event_loop import AsyncRewards

            self.asynchronous = AsyncRewards(own_loop, self.names, self.limits)
        self._is_started = False

    def launch(self) -> None:
        if self._pool is not None and not self._is_started:
            self._pool.launch()
        if self.shadow is not None:
            self.shadow.launch()

    def start(self) -> None:
        """Prepare the rewards; PluginError names a faulty one. Idempotent; the first batch calls it too."""
        if not self._is_started:
            if self.asynchronous is not None:
                self.asynchronous.prepare()
            if self._pool is not None:
                try:
                    self._pool.start()
                except ChildFailure as error:
                    raise PluginError(self._cannot_start(error)) from error
            self._is_started = True
        if self.shadow is not None:
            self.shadow.start()

    def close(self) -> None:
        self._is_started = False
        if self.asynchronous is not None:
            self.asynchronous.close()
        if self._pool is not None:
            self._pool.close()
        if self.shadow is not None:
            self.shadow.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def batch(
        self, label: str = "", failures: Path | None = None, *, fresh: bool = False, rests: bool = False
    ) -> Iterator[ScoringBatch]:
        """Open one step's scores; leaving the block cancels the outstanding ones, so that the next batch begins clean.

        With `fresh` every text is scored again, equal ones too, and only by the rewards. A batch that `rests` scores a
        single text and fails the others: so a shadow that failed on all of `MOST_LOST` batches in a row costs little.
        """
        self.start()
        rests_now = self._lost_batches >= MOST_LOST
        with nullcontext() if fresh or self.shadow is None else self.shadow.batch(rests=rests_now) as shadow:
            batch = ScoringBatch(self, label=label, failures=failures, fresh=fresh, shadow=shadow, rests=rests)
            try:
                yield batch
                if shadow is not None:
                    self._lost_batches = self._lost_batches + 1 if shadow.is_lost else 0
            finally:
                batch.cancel()

    def submit(self, task: Task) -> None:
        if self.asynchronous is not None and task.reward in self.asynchronous.rewards:
            self.asynchronous.submit(task)
            return
        assert self._pool is not None
        self._pool.submit(task)

    def drop_cancelled(self) -> None:
        if self._pool is not None:
            self._pool.drop_cancelled()
        if self.asynchronous is not None:
            self.asynchronous.drop_cancelled()

    def reward_metrics(self) -> dict[str, float]:
        return self.asynchronous.metrics() if self.asynchronous is not None else {}

    def _cannot_start(self, error: ChildFailure) -> Problem:
        in_pool = [each for each in self.rewards if not inspect.iscoroutinefunction(each.reward.score)]
        names = ", ".join(repr(each.name) for each in in_pool)
        what = f"a scoring process with reward {names} could not be started: {error}"
        if isinstance(error, ChildError):
            last = error.traceback.strip().splitlines()[-3:-1]
            why, fix = " ".join(" ".join(last).split()), "repair the reward"
            return Problem(code="reward.cannot-prepare", where="scoring", what=what, why=why, fix=fix)
        why = f"it may use {self._memory_gb:g} GiB of memory" if self._memory_gb else ""
        fix = "repair the reward, or raise [scoring] memory_gb"
        return Problem(code="reward.cannot-start", where="scoring", what=what, why=why, fix=fix)


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
        # Only now: whether a text is scored must not depend on which of its batch finished first.
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
        pairs = zip(scores, self._shadow.tolerated(), strict=True)
        return [replace(score, shadow=of_shadow) for score, of_shadow in pairs]

    def tolerated(self) -> list[Score]:
        """Collect a shadow's scores: failures end nothing, and a warning reports them above `max_failed_frac`."""
        try:
            scores = self.collect(within_budget=False)
        except RewardError as error:
            # The reward blocks the event loop, and `give_up` has failed all its scores, so collecting again ends.
            LOG.warning("the shadow: %s", error.problems[0].what)
            scores = self.collect(within_budget=False)
        failed = [score.detail for score in scores if score.outcome is Outcome.FAILED]
        if len(failed) > self.service.limits[0].max_failed_frac * len(scores):
            text, first = "shadow %r failed on %d of %d completions; first: %s", printable(hide_text(failed[0]))
            LOG.warning(text, self.service.names[0], len(failed), len(scores), first)
        return scores

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
