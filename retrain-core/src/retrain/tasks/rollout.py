"""Rollouts of one answer each: groups are sampled, and completions are scored while others are being sampled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.backend import Backend, Deliver, DeliversEarly
from retrain.kernel.contracts.context import PhaseProgress
from retrain.kernel.contracts.tasks import Prompt, RolloutBatch, Streams
from retrain.kernel.errors import BackendError, NonFiniteError, Problem
from retrain.kernel.types import Completion, Floats, Sample, SampleRequest, SamplingParams, Score, joined_experts
from retrain.tasks.scoring.service import ScoringBatch, ScoringService
from retrain.text.progress import SCORES
from retrain.text.thinking import Thinking, Thought

if TYPE_CHECKING:
    from retrain.tasks.thinking_budget import ThinkingBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleTurn:
    """Rollouts of one answer each, scored by the rewards of the run."""

    backend: Backend
    tokenizer: Any
    scoring: ScoringService
    params: SamplingParams
    progress: PhaseProgress = field(default_factory=PhaseProgress)
    has_verifier: bool = True
    thinking: Thinking | None = None
    budget: ThinkingBudget | None = None

    @contextmanager
    def batch(self, label: str, failures: Path | None = None) -> Iterator[RolloutBatch]:
        with self.scoring.batch(label, failures) as scores:
            yield _SingleTurnBatch(self, scores)

    def close(self) -> None:
        self.scoring.close()


class _SingleTurnBatch:
    def __init__(self, owner: SingleTurn, scores: ScoringBatch) -> None:
        self._owner = owner
        self._scores = scores
        self._tickets: list[list[int]] = []
        self._cut_rate = 0.0

    def sample(self, prompts: Sequence[Prompt], group_size: int, streams: Streams) -> list[tuple[Completion, ...]]:
        tokenizer, progress = self._owner.tokenizer, self._owner.progress
        requests = [
            SampleRequest(prompt_T=prompt.tokens_T, seeds_G=tuple(streams.of(prompt, i) for i in range(group_size)))
            for prompt in prompts
        ]
        thinking = self._owner.thinking or Thinking(tokenizer=tokenizer)
        submitted: dict[tuple[int, int], tuple[int, str, Thought | None]] = {}  # with the ticket

        def deliver(group: int, index: int, sample: Sample) -> None:
            progress.add(1, tokens=len(sample.tokens_T))
            text = str(tokenizer.decode(sample.tokens_T, skip_special_tokens=True))
            thought = thinking.split(prompts[group].tokens_T, sample.tokens_T)
            ticket = self._scores.submit(prompts[group].example, thinking.seen(text, thought))
            submitted[group, index] = ticket, text, thought

        of_examples = f" of {len(prompts)} examples" if streams.purpose == "eval" else ""
        progress.begin(f"completions{of_examples}", len(prompts) * group_size, limit=self._owner.params.max_tokens)
        names = [f"example {prompt.example.id}" for prompt in prompts]
        samples = draw_samples(
            self._owner.backend, requests, self._owner.params, names, deliver, budget=self._owner.budget
        )
        for group, index in _indices(samples):
            if (group, index) not in submitted:
                deliver(group, index, samples[group][index])
        cut = [sample.forced_T is not None and sample.forced_T.any() for group in samples for sample in group]
        self._cut_rate = sum(cut) / max(1, len(cut))
        self._tickets = [[submitted[group, i][0] for i in range(group_size)] for group in range(len(prompts))]
        return [
            tuple(_completion(prompt, sample, *submitted[group, i][1:]) for i, sample in enumerate(samples[group]))
            for group, prompt in enumerate(prompts)
        ]

    def scores(self) -> list[tuple[Score, ...]]:
        progress, waiting = self._owner.progress, self._scores.num_outstanding
        if waiting:  # while completions were sampled, others were scored already
            progress.begin(SCORES, waiting)
        found = self._scores.collect(count=progress.add)
        return [tuple(found[ticket] for ticket in group) for group in self._tickets]

    def metrics(self) -> Mapping[str, float]:
        return {**self._scores.metrics(), **({"cut_thought_rate": self._cut_rate} if self._owner.budget else {})}


def draw_samples(
    backend: Backend,
    requests: Sequence[SampleRequest],
    params: SamplingParams,
    names: Sequence[str],
    deliver: Deliver | None = None,
    *,
    budget: ThinkingBudget | None = None,
) -> list[list[Sample]]:
    """Return the backend's samples, checked; `deliver` gets each sample early where the backend can do that.

    `names` label the requests in messages; a `budget` limits thoughts. BackendError on a wrong number of samples,
    NonFiniteError on log-probabilities or entropies that are not finite.
    """
    if budget is not None:
        return budget.draw(partial(draw_samples, backend), requests, params, names, deliver)

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
        what = f"requested groups of {counts} completions, got groups of {[len(group) for group in samples]}"
        fix = "the backend must return one sample per seed"
        raise BackendError(Problem(code="backend.wrong-samples", where="sampling", what=what, fix=fix))
    for group, index in _indices(samples):
        check_sample(samples[group][index], names[group])
    return samples


def budget_of(config: Config, thinking: Thinking, context_length: int | None) -> ThinkingBudget | None:
    """The limit of `[training] max_thinking_tokens`; ConfigError where the template has no tag that ends a thought."""
    if not config.training.max_thinking_tokens:
        return None
    from retrain.tasks.thinking_budget import ThinkingBudget  # most runs have none

    return ThinkingBudget.of(config, thinking, context_length)


def check_sample(sample: Sample, name: str) -> None:
    for kind, values in (
        ("log-probability", sample.logprobs_T),
        ("entropy", sample.entropies_T),
        ("log-probability of the engine itself", sample.engine_logprobs_T),
    ):
        if values is not None and (len(values) != len(sample.tokens_T) or not np.isfinite(values).all()):
            what = f"sampler returned a {kind} that is not finite, or not one per token, for {name}"
            fix = "check the model's weights and dtype"
            raise NonFiniteError(Problem(code="engine.bad-numbers", where="sampling", what=what, fix=fix))


def _indices(samples: Sequence[Sequence[Sample]]) -> list[tuple[int, int]]:
    return [(group, index) for group, drawn in enumerate(samples) for index in range(len(drawn))]


def _completion(prompt: Prompt, sample: Sample, text: str, thought: Thought | None) -> Completion:
    prompt_len = len(prompt.tokens_T)

    def after_prompt(values_T: Floats | None) -> Floats | None:
        return None if values_T is None else np.concatenate([np.zeros(prompt_len), values_T])

    return Completion(
        tokens_T=np.concatenate([prompt.tokens_T, sample.tokens_T]),
        action_T=np.concatenate([np.zeros(prompt_len, np.bool_), sample.action_T]),
        logprobs_T=np.concatenate([np.zeros(prompt_len), sample.logprobs_T]),
        entropies_T=after_prompt(sample.entropies_T),
        engine_logprobs_T=after_prompt(sample.engine_logprobs_T),
        experts_TLK=joined_experts(
            [sample.context_experts_TLK, sample.experts_TLK], [prompt.tokens_T, sample.tokens_T]
        ),
        text=text,
        stop_reason=sample.stop_reason,
        policy_version=sample.policy_version,
        reasoning=thought.reasoning if thought else "",
        answer=thought.answer if thought else None,
    )
