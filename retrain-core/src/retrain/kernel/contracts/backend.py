"""The contracts of engine (samples), backend (trains), warm-up and teacher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from retrain.kernel.declared import Capabilities
from retrain.kernel.types import ActionRow, Floats, Sample, SampleRequest, SamplingParams, TrainBatch, TrainReport

# Number of the request, number of the seed, and the finished sample.
Deliver = Callable[[int, int, Sample], None]


class Engine(Protocol):
    """Samples completions from the current policy. It may also be `DeliversEarly`, `Measuring` and `Publishing`."""

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[list[Sample]]:
        """One list per request, one sample per seed, in order; a sample depends only on its prompt and seed."""

    def close(self) -> None:
        """Release all resources (device memory, processes); safe to call twice."""


class Backend(Protocol):
    """Owns the policy: samples from it, trains it, saves it.

    It may also be `DeliversEarly`, `Measuring` and `OverlapsTraining`.
    """

    capabilities: Capabilities

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[list[Sample]]:
        """Sample as `Engine.sample` does, from the policy last published."""

    def train(self, batch: TrainBatch) -> TrainReport:
        """One optimizer step over at least one row; NonFiniteError, and unchanged weights, on a non-finite number.

        A step of the run may be several, `batch.updates`, before `publish`. A backend that trains at `batch.lr` reports
        it as `TrainReport.lr`; others cannot follow an `[optimizer] schedule`.
        """

    def logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        """Optional: the log-probabilities that `train` computes for the rows' action tokens, 0 at others; read-only."""

    def reference_logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        """Optional, for `[kl]`: as `logprobs`, of the policy that training began with."""

    def squared_probs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        """Optional, for `Needs.squared_probs`: as `logprobs`, the sum of the squares of all tokens' probabilities."""

    def teacher_logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        """Optional, for `[distil]`: as `logprobs`, of the weights that its key `teacher` names."""

    def publish(self) -> int:
        """Make the trained policy the one that `sample` uses; return its version, 0 before any training."""

    def save_adapter(self, folder: Path) -> None:
        """Write a PEFT adapter into an existing empty folder, or a model of transformers if all weights are trained."""

    def save(self, folder: Path) -> None:
        """Write adapter, optimizer and all else that `load` needs into an existing empty folder."""

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote."""

    def sample_from(self, folder: Path | None) -> None:
        """Optional, outside a run: sample from what `save` or PEFT wrote there; None = what training began with."""

    def close(self) -> None: ...


class WarmUp(Protocol):
    """S optimizer steps before step 0, numbered -(S + 1) to -2: step -1 is the evaluation before training."""

    first_step: int  # -(S + 1)

    def take(self, step: int, train: Callable[[TrainBatch], TrainReport]) -> dict[str, Any]:
        """Train one step; return its line. It keeps no state: seed and number determine the step's examples."""


@runtime_checkable
class DeliversEarly(Protocol):
    """An engine or backend that hands over each sample once it is finished, so that scoring overlaps sampling.

    If `delivers_early` is True, `sample` takes a third argument. Otherwise scoring starts once `sample` has returned.
    """

    delivers_early: bool

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, deliver: Deliver | None = None
    ) -> list[list[Sample]]:
        """Sample as `Engine.sample` does; `deliver` is called in this thread, at most once per sample."""


@runtime_checkable
class Publishing(Protocol):
    """An engine with a copy of the policy that must be updated to each new version."""

    def publish(self) -> None:
        """Make `sample` use `policy.version` from now on; BackendError when the copy cannot be verified to be it.

        Called after each change of the policy and before the next `sample`, with no `sample` under way.
        """


@runtime_checkable
class Measuring(Protocol):
    """A backend or engine that adds fields to the step's line in `metrics.jsonl`."""

    def metrics(self) -> Mapping[str, float]:
        """Finite numbers about the work since the previous call; called once per step."""


class Teacher(Protocol):
    """A model that gives log-probabilities of given tokens."""

    def logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        """Log-probabilities of the rows' action tokens under softmax(logits / temperature), 0 at others.

        `[T]` per row, in nats. BackendError when it cannot give one of them.
        """

    def state(self) -> Mapping[str, Any]:
        """State, as JSON, with which a resumed run gets the same numbers, to the bit; {} for none."""

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None:
        """Release memory and connections; safe to call twice."""
