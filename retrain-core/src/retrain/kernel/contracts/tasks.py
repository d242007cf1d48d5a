"""What a step sees of the tasks: prompts in a seeded order, and rollouts with their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from retrain.kernel.contracts.backend import Backend
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Completion, Example, Score, Tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """An example together with its tokens; `epoch` tells its draws apart: passes over the pool before, by default."""

    example: Example
    tokens_T: Tokens
    epoch: int = 0


class Prompts(Protocol):
    """Training prompts, each as often as a sampler chooses it."""

    def draw(self, cursor: int, count: int, step: int) -> list[Prompt]:
        """`count` prompts for a step, after the `cursor` ones that the run drew before; asked again, the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Seeds of completions: the stream of each is keyed by purpose, example, epoch and number.

    Neither the step nor the batch size is in the key, so neither changes a completion.
    """

    seeds: Seeds
    purpose: str

    def of(self, prompt: Prompt, number: int, turn: int = 0) -> int:
        """Seed of completion `number` of a prompt; every turn of an episode has its own."""
        later = (turn,) if turn else ()
        return self.seeds.derive(self.purpose, prompt.example.id, prompt.epoch, number, *later)


class RolloutBatch(Protocol):
    """The rollouts of one step or evaluation: `sample` first, then `scores`, then `metrics`."""

    def sample(self, prompts: Sequence[Prompt], group_size: int, streams: Streams) -> list[tuple[Completion, ...]]:
        """`group_size` completions of every prompt; BackendError when they cannot be sampled."""

    def scores(self) -> list[tuple[Score, ...]]:
        """The score of each completion; RewardError when more failed than the configuration allows."""

    def metrics(self) -> Mapping[str, float]:
        """Further fields for the step's line, after `scores`.

        In several rounds `_mean` and `_rate` fields are those of the first, `_max` the largest; the rest adds up.
        """


class Rollouts(Protocol):
    """The one contract of tasks: a single-turn verifier and an episode of many turns are the same to the step.

    Optional: `has_verifier`, False where nothing is judged, so that no correct rate is recorded.
    """

    def batch(self, label: str, failures: Path | None = None) -> AbstractContextManager[RolloutBatch]:
        """Open the rollouts of a step or an evaluation; work that is unfinished when the block ends is abandoned.

        Texts whose scoring failed are kept in the folder `failures`, under `label`.
        """

    def close(self) -> None:
        """Release processes; safe to call twice."""


class Evaluation(Protocol):
    """Scores the policy on examples that are never trained on."""

    def is_due(self, step: int) -> bool:
        """Whether to evaluate after this step; before the first one it is always due."""

    def measure(self, step: int, backend: Backend, failures: Path | None) -> dict[str, Any]:
        """Fields for the line of a step, -1 before training: the same for the same policy, time apart."""

    def records(self) -> Sequence[Mapping[str, Any]]:
        """A line of `eval.jsonl` per example about what `measure` found last; none when called again."""

    def close(self) -> None:
        """Release processes; safe to call twice."""
