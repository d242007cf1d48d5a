"""The scoring service of a run: batches of completions, scored while others are still being sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from queue import SimpleQueue

from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.types import Example, Outcome
from retrain.tasks.scoring.batch import ScoringBatch, VerdictCache
from retrain.tasks.scoring.dispatcher import Dispatcher, NamedReward
from retrain.tasks.scoring.failures import FailureWriter
from retrain.tasks.scoring.task import Limits, Task

MOST_LOST = 3


class ScoringService:
    """The rewards of a run at work: `with service.batch() as batch`, `batch.submit(...)`, `batch.collect()`.

    One batch is open at a time. Scores depend neither on the number of workers nor on which of them finishes first.
    `shadow` scores the same texts in processes and with a cache of its own; see `ScoringBatch`.
    """

    def __init__(
        self, rewards: Sequence[NamedReward], settings: ScoringTable, *, shadow: ScoringService | None = None
    ) -> None:
        self.shadow = shadow
        self._lost_batches = 0  # in a row, in which the shadow failed on every text
        self._dispatcher = Dispatcher(rewards, settings)
        self._cache = VerdictCache() if settings.cache else None
        self._writer = FailureWriter()

    @property
    def rewards(self) -> tuple[NamedReward, ...]:
        """The rewards with their names and weights, in the order of the configuration."""
        return self._dispatcher.rewards

    @property
    def limits(self) -> tuple[Limits, ...]:
        """The limits of each reward."""
        return self._dispatcher.limits

    @property
    def names(self) -> tuple[str, ...]:
        """The rewards, as the configuration names them."""
        return tuple(each.name for each in self.rewards)

    def launch(self) -> None:
        """Start a scoring process and return at once; see `Dispatcher.launch`."""
        self._dispatcher.launch()
        if self.shadow is not None:
            self.shadow.launch()

    def start(self) -> None:
        """Prepare the rewards; PluginError says what is wrong with one. The first batch does it otherwise."""
        self._dispatcher.start()
        if self.shadow is not None:
            self.shadow.start()

    def close(self) -> None:
        """End all processes and threads; safe to call twice."""
        self._dispatcher.close()
        if self.shadow is not None:
            self.shadow.close()

    def __enter__(self) -> ScoringService:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fault(self, reward: int, pairs: Sequence[tuple[Example, str]]) -> str:
        """Why one reward, by its number, fails on the first pair, if it fails on all; empty otherwise.

        A text that takes too long ends the trial without a fault, since the next may not.
        """
        self.start()
        finished: SimpleQueue[Task] = SimpleQueue()
        first = ""
        for example, text in pairs:
            limits = self.limits[reward]
            self._dispatcher.submit(Task(reward=reward, example=example, text=text, limits=limits, finished=finished))
            task = finished.get()
            if task.score.outcome is not Outcome.FAILED or task.last.is_timeout:
                return ""
            first = first or task.score.detail
        return first

    @contextmanager
    def batch(
        self, label: str = "", failures: Path | None = None, *, fresh: bool = False, rests: bool = False
    ) -> Iterator[ScoringBatch]:
        """One step's scores; leaving the block cancels what is outstanding, so that the next batch begins clean.

        Scores that fail for good are written to `<failures>/<label>_<n>.json`. With `fresh` every text is scored anew,
        equal ones too, and by the rewards alone. One that `rests` scores a single text and fails the others, so that a
        shadow that failed on all of `MOST_LOST` batches in a row takes the time of one text until it answers again.
        """
        self.start()
        rests_now = self._lost_batches >= MOST_LOST
        with nullcontext() if fresh or self.shadow is None else self.shadow.batch(rests=rests_now) as shadow:
            batch = ScoringBatch(
                self._dispatcher,
                cache=None if fresh else self._cache,
                writer=self._writer,
                label=label,
                failures=failures,
                shadow=shadow,
                rests=rests,
            )
            try:
                yield batch
                if shadow is not None:
                    self._lost_batches = self._lost_batches + 1 if shadow.is_lost else 0
            finally:
                batch.cancel()
