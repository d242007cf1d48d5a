"""Samples a group of completions for each prompt, and has each scored while others are still being sampled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from retrain.kernel.contracts.backend import Deliver, DeliversEarly
from retrain.kernel.errors import BackendError, NonFiniteError, Problem
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Completion, Floats, Sample, SampleRequest, SamplingParams, Score
from retrain.rooms.tasks.prompts import Prompt
from retrain.rooms.tasks.scoring.batch import ScoringBatch
from retrain.rooms.tasks.scoring.service import ScoringService

if TYPE_CHECKING:
    from retrain.kernel.contracts.backend import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Where the randomness of completions comes from: the stream of each is keyed by purpose, example, epoch, number.

    Neither the step nor the batch size is in the key, so neither changes a completion.
    """

    seeds: Seeds
    purpose: str

    def of(self, prompt: Prompt, number: int, turn: int = 0) -> int:
        """Seed of completion `number` of a prompt; the turns of an episode have one each."""
        later = (turn,) if turn else ()
        return self.seeds.derive(self.purpose, prompt.example.id, prompt.epoch, number, *later)


class Draw(Protocol):
    """The completions of one step or evaluation: sampled first, then asked for their scores."""

    def sample(self, prompts: Sequence[Prompt], group_size: int, streams: Streams) -> list[tuple[Completion, ...]]:
        """`group_size` completions of every prompt. BackendError on what could not have been drawn."""

    def scores(self) -> list[tuple[Score, ...]]:
        """The score of each completion; RewardError when more failed than the configuration allows."""

    def metrics(self) -> Mapping[str, float]:
        """Further fields for the step's line, after `scores`."""


class Rollouts(Protocol):
    """How completions come about: by one answer each, or by the turns of an environment."""

    @contextmanager
    def draw(self, label: str, failures: Path | None = None) -> Iterator[Draw]:
        """Open a step's or an evaluation's draw; what it still has under way when the block is left, is given up.

        Scores that failed leave their texts in the folder `failures`, by `label`.
        """

    def close(self) -> None:
        """Release processes; safe to call twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleTurn:
    """One answer per completion, scored by the rewards of the run."""

    backend: Backend
    tokenizer: Any
    scoring: ScoringService
    params: SamplingParams

    @contextmanager
    def draw(self, label: str, failures: Path | None = None) -> Iterator[Draw]:
        """See `Rollouts.draw`."""
        with self.scoring.batch(label, failures) as batch:
            yield _SingleTurnDraw(self, batch)

    def close(self) -> None:
        """Stop the scoring processes."""
        self.scoring.close()


class _SingleTurnDraw:
    def __init__(self, owner: SingleTurn, batch: ScoringBatch) -> None:
        self._owner = owner
        self._batch = batch
        self._tickets: list[list[int]] = []

    def sample(self, prompts: Sequence[Prompt], group_size: int, streams: Streams) -> list[tuple[Completion, ...]]:
        tokenizer = self._owner.tokenizer
        requests = [
            SampleRequest(prompt_T=prompt.tokens_T, seeds_G=tuple(streams.of(prompt, i) for i in range(group_size)))
            for prompt in prompts
        ]
        submitted: dict[tuple[int, int], tuple[int, str]] = {}  # (ticket, text)

        def deliver(group: int, index: int, sample: Sample) -> None:
            text = str(tokenizer.decode(sample.tokens_T, skip_special_tokens=True))
            submitted[group, index] = self._batch.submit(prompts[group].example, text), text

        names = [f"example {prompt.example.id}" for prompt in prompts]
        samples = draw_samples(self._owner.backend, requests, self._owner.params, names, deliver)
        for group, index in _places(samples):
            if (group, index) not in submitted:
                deliver(group, index, samples[group][index])
        self._tickets = [[submitted[group, i][0] for i in range(group_size)] for group in range(len(prompts))]
        return [
            tuple(_completion(prompt, sample, submitted[group, i][1]) for i, sample in enumerate(samples[group]))
            for group, prompt in enumerate(prompts)
        ]

    def scores(self) -> list[tuple[Score, ...]]:
        found = self._batch.collect()
        return [tuple(found[ticket] for ticket in group) for group in self._tickets]

    def metrics(self) -> Mapping[str, float]:
        return self._batch.metrics()


def draw_samples(
    backend: Backend,
    requests: Sequence[SampleRequest],
    params: SamplingParams,
    names: Sequence[str],
    deliver: Deliver | None = None,
) -> list[list[Sample]]:
    """What the backend samples, checked; `deliver` is told early where the backend can do that.

    `names` say whose each request is. BackendError on a wrong number of samples, NonFiniteError on numbers that no
    distribution has.
    """

    def take(group: int, index: int, sample: Sample) -> None:
        check_sample(sample, names[group])
        if deliver is not None:
            deliver(group, index, sample)

    if deliver is not None and isinstance(backend, DeliversEarly) and backend.delivers_early:
        samples = backend.sample(requests, params, take)
    else:
        samples = backend.sample(requests, params)
    counts = [len(request.seeds_G) for request in requests]
    if [len(group) for group in samples] != counts:
        what = f"asked for groups of {counts} completions, got groups of {[len(group) for group in samples]}"
        raise BackendError(Problem(where="sampling", what=what, fix="the backend must return one sample per seed"))
    for group, index in _places(samples):
        check_sample(samples[group][index], names[group])
    return samples


def check_sample(sample: Sample, name: str) -> None:
    """NonFiniteError unless log-probabilities and entropies are finite and one per token."""
    for field, values in (
        ("log-probability", sample.logprobs_T),
        ("entropy", sample.entropies_T),
        ("log-probability of the engine's own", sample.engine_logprobs_T),
    ):
        if values is not None and (len(values) != len(sample.tokens_T) or not np.isfinite(values).all()):
            what = f"sampler returned a {field} that is not finite, or not one per token, for {name}"
            raise NonFiniteError(Problem(where="sampling", what=what, fix="check the model's weights and dtype"))


def _places(samples: Sequence[Sequence[Sample]]) -> list[tuple[int, int]]:
    return [(group, index) for group, drawn in enumerate(samples) for index in range(len(drawn))]


def _completion(prompt: Prompt, sample: Sample, text: str) -> Completion:
    """Prompt and sampled tokens as one row."""
    ahead, drawn = len(prompt.tokens_T), len(sample.tokens_T)

    def after_prompt(values_T: Floats | None) -> Floats | None:
        return None if values_T is None else np.concatenate([np.zeros(ahead), values_T])

    return Completion(
        tokens_T=np.concatenate([prompt.tokens_T, sample.tokens_T]),
        action_T=np.concatenate([np.zeros(ahead, np.bool_), np.ones(drawn, np.bool_)]),
        logprobs_T=np.concatenate([np.zeros(ahead), sample.logprobs_T]),
        entropies_T=after_prompt(sample.entropies_T),
        engine_logprobs_T=after_prompt(sample.engine_logprobs_T),
        text=text,
        stop_reason=sample.stop_reason,
        policy_version=sample.policy_version,
    )
