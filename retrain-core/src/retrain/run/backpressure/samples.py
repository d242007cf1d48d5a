"""The measurements that the curve is fitted to: few, varied, and of completions as long as the current ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_SAMPLES = 100
LENGTH_BAND = 2.0  # completions whose mean lengths differ by more than this factor cost too differently for one curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A step: `p` concurrent completions, `throughput` in sampled tokens per second, mean length in tokens."""

    p: int
    throughput: float
    mean_tokens: float


@dataclass(slots=True)
class Window:
    """The last `MAX_SAMPLES` samples, thinned where they are most frequent.

    A settled run keeps measuring one p. When the window is full, it drops the oldest sample of the most frequent p, so
    that it keeps the others, without which no curve can be fitted.
    """

    samples: list[Sample] = field(default_factory=list)

    def add(self, sample: Sample) -> None:
        """Add a sample."""
        self.samples.append(sample)
        if len(self.samples) > MAX_SAMPLES:
            counts = Counter(each.p for each in self.samples)
            crowded = max(counts, key=lambda p: (counts[p], p == sample.p))
            self.samples.remove(next(each for each in self.samples if each.p == crowded))

    def comparable(self, mean_tokens: float) -> list[tuple[float, float]]:
        """(p, throughput) of the samples whose completions were about as long, within `LENGTH_BAND`.

        Answers grow during training and long ones cost more per token: old samples would look like contention.
        """
        low, high = mean_tokens / LENGTH_BAND, mean_tokens * LENGTH_BAND
        return [(float(each.p), each.throughput) for each in self.samples if low <= each.mean_tokens <= high]

    def state(self) -> list[list[float]]:
        """The samples as JSON."""
        return [[each.p, each.throughput, each.mean_tokens] for each in self.samples]

    @classmethod
    def of_state(cls, state: Sequence[Sequence[float]]) -> Window:
        """The window that `state` returned."""
        return cls([Sample(p=int(p), throughput=x, mean_tokens=length) for p, x, length in state])
