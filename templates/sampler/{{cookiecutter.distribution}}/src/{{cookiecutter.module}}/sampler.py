"""Sampler `{{ cookiecutter.name }}`: prompts the more often, the more of their latest completions were wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from retrain.api import Example, GroupOutcome, PluginContext, {% if cookiecutter.form == "file" %}PluginSpec, {% endif %}PromptChoice, PromptRequest, Seeds


class Params(BaseModel):
    """`[data.sampler_params]`: the weight of a prompt whose completions were all right; all wrong is 1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    floor: float = Field(default=0.1, gt=0.0, le=1.0)


class Mistakes:
    """Draws without replacement, with probability proportional to floor + (1 - floor) x share of wrong completions."""

    def __init__(self, ids: Sequence[str], params: Params, seeds: Seeds) -> None:
        self._ids, self._params, self._seeds = ids, params, seeds
        self._wrong: dict[str, float] = {}  # share of the latest group

    def choose(self, request: PromptRequest) -> list[PromptChoice]:
        """`request.count` prompts that are not taken; those that were never drawn count as wrong."""
        free = [each for each in self._ids if each not in request.taken]
        wrong_N = np.array([self._wrong.get(each, 1.0) for each in free])
        weights_N = self._params.floor + (1.0 - self._params.floor) * wrong_N
        stream = self._seeds.stream("sampler", request.step, request.cursor)
        waits_N = stream.exponential(size=len(free)) / weights_N  # the first to come are drawn in proportion to weights
        return [PromptChoice(example_id=free[index]) for index in np.argsort(waits_N)[: request.count]]

    def observe(self, step: int, outcomes: Sequence[GroupOutcome]) -> None:
        """Remember the share of wrong completions of each group that has a verdict."""
        for outcome in outcomes:
            if outcome.judged:
                self._wrong[outcome.example_id] = 1.0 - outcome.correct / outcome.judged

    def state(self) -> Mapping[str, Any]:
        """Return the state that the run's checkpoints keep."""
        return {"wrong": self._wrong}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`."""
        self._wrong = dict(state["wrong"])


def create(context: PluginContext, examples: Sequence[Example]) -> Mistakes:
    """Build the sampler of a run; `examples` is its training pool, without held-out examples."""
    params = context.params if isinstance(context.params, Params) else Params()
    return Mistakes([example.id for example in examples], params, context.seeds)
{% if cookiecutter.form == "file" %}


PLUGIN = PluginSpec(
    name="{{ cookiecutter.name }}",
    summary="{{ cookiecutter.description }}",
    factory=create,
    params=Params,
)
{% endif %}
