"""One greedy completion more for each prompt of a step, for credit that compares with it. It is scored, not trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import Streams
from retrain.kernel.errors import NonFiniteError
from retrain.kernel.parts import Planned, Sample, Sampled
from retrain.kernel.progress import Clock
from retrain.kernel.types import Completion, SamplingParams, Score
from retrain.tasks.tasks import Tasks

PURPOSE = "greedy"


def greedy_first(
    select: Callable[[Sample], Sample], tasks: Tasks, backend: Backend, context: PluginContext
) -> Callable[[Sample], Sample]:
    """Add `with_greedy` innermost, so that every round has its own and a control replaces these scores, too."""
    return lambda sample: select(with_greedy(sample, tasks, backend, context))


def with_greedy(sample: Sample, tasks: Tasks, backend: Backend, context: PluginContext) -> Sample:
    """The same sampling, and then the greedy completions of its prompts, by the policy and the verifier of the step."""
    training = context.config.training
    params = SamplingParams(max_tokens=training.max_tokens, temperature=training.temperature, greedy=True)
    rollouts = tasks.verifier.rollouts(backend, context, params, tasks.context_length)

    def sampled_twice(planned: Planned, clock: Clock) -> Sampled:
        sampled = sample(planned, clock)
        if sampled.error:
            return sampled
        try:
            with rollouts.batch(f"{planned.label}_{PURPOSE}") as batch:
                with clock.timed("sample"):
                    found = batch.sample(sampled.prompts, 1, Streams(seeds=context.seeds, purpose=PURPOSE))
                with clock.timed("score"):
                    scores = batch.scores()
        except NonFiniteError as error:
            return Sampled(prompts=sampled.prompts, error=error)
        pairs = [(completion, score) for (completion,), (score,) in zip(found, scores, strict=True)]
        groups = tuple(
            replace(group, greedy=completion, greedy_score=score)
            for group, (completion, score) in zip(sampled.groups, pairs, strict=True)
        )
        return replace(sampled, groups=groups, metrics={**sampled.metrics, **_fields(pairs)})

    return sampled_twice


def _fields(pairs: Sequence[tuple[Completion, Score]]) -> dict[str, float]:
    values = [score.value for _, score in pairs if score.value is not None]
    fields = {"greedy_tokens": sum(completion.num_actions for completion, _ in pairs)}
    fields["greedy_no_verdict_count"] = len(pairs) - len(values)
    return {**fields, **({"greedy_reward_mean": float(np.mean(values))} if values else {})}
