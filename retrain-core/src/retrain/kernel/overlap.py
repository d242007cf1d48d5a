"""How sampling and training follow each other: here in turn, so that everything is on-policy.

Where the backend can do both at once, `Parts.overlap` is a subclass that samples coming steps while one trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from retrain.kernel.contracts.backend import Backend, Measuring
from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.errors import NonFiniteError
from retrain.kernel.progress import Clock
from retrain.kernel.types import Group, TrainBatch, TrainReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Prompts to sample for a step: `batch_size` from position `cursor` on, after `round` other rounds of them."""

    step: int
    cursor: int
    batch_size: int
    round: int = 0
    is_announced: bool = True  # to hooks, with its phases; False in another thread than the run's

    @property
    def label(self) -> str:
        """Name of the files about these prompts."""
        return f"step_{self.step:06d}" + (f"_round_{self.round}" if self.round else "")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """Prompts, a scored group for each, and the fields that sampling and scoring add to the step's line.

    With `error` there is no group: the completions could not be sampled, and the step is rejected.
    """

    prompts: Sequence[Prompt]
    groups: tuple[Group, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: NonFiniteError | None = None


Sample = Callable[[Planned, Clock], Sampled]
Train = Callable[[TrainBatch], TrainReport]
Upcoming = Callable[[], Planned | None]  # the next step; None after the last one


def measured(backend: Backend) -> Mapping[str, float]:
    """What the backend measured since the previous call; empty when it measures nothing."""
    return backend.metrics() if isinstance(backend, Measuring) else {}


class Serial:
    """Sampling and training take turns. `batch_size` is the number of prompts already sampled for the next step: 0."""

    batch_size = 0

    def __init__(self, backend: Backend, train: Train, sample: Sample) -> None:
        self._backend, self._train, self._sample, self._version = backend, train, sample, 0

    def collect(self, planned: Planned, clock: Clock) -> Sampled:
        """Sample the step's scored groups now."""
        return self._sample(planned, clock)

    def train(self, batch: TrainBatch, clock: Clock, upcoming: Upcoming) -> TrainReport:
        """Train, then publish the trained policy."""
        with clock.timed("train"):
            report = self._train(batch)
            self._version = self._backend.publish()
        return report

    def metrics(self) -> Mapping[str, float]:
        """What the backend measured in this step."""
        return measured(self._backend)

    @contextmanager
    def evaluation(self) -> Iterator[Mapping[str, float]]:
        """For the time of one: yields what the step measured; what is measured meanwhile belongs to no step."""
        yield self.metrics()
        self.metrics()

    def staleness(self, groups: tuple[Group, ...]) -> dict[str, float]:
        """Nothing is stale."""
        return {}

    def finish(self, clock: Clock, *, has_trained: bool) -> dict[str, float]:
        """Note that the step is over, trained or not; returns the timing fields of its line."""
        return clock.fields()

    def start(self, clock: Clock, upcoming: Upcoming, *, is_restored: bool) -> None:
        """Publish the policy of the checkpoint, if the run continues from one."""
        if is_restored:
            self._backend.publish()

    def drop(self) -> None:
        """Nothing was sampled in advance."""

    def close(self) -> None:
        """Nothing to release."""
