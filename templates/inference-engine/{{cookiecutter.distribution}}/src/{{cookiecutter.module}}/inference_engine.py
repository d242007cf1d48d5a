"""Inference engine `{{ cookiecutter.name }}`: passes requests to another engine in portions of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from retrain.api import (
    Engine,
    Kind,
    PluginContext,
{% if cookiecutter.form == "file" %}
    PluginSpec,
{% endif %}
    Sample,
    SampleRequest,
    SamplingParams,
    resolve,
)

INNER_ENGINE = "pytorch"


class Options(BaseModel):
    """`[inference.options]`: how many completions are sampled in parallel at most."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_completions: int = Field(default=64, ge=1)


class InPortions:
    """Samples at most `max_completions` in parallel; requests that fit stay whole, so each prompt is read once."""

    def __init__(self, inner: Engine, max_completions: int) -> None:
        self._inner = inner
        self._max_completions = max_completions

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[list[Sample]]:
        """One list per request, one sample per seed, in order."""
        samples: list[list[Sample]] = [[] for _ in requests]
        for portion in self._portions(requests):
            portion_samples = self._inner.sample([request for _, request in portion], params)
            for (number, _), found in zip(portion, portion_samples, strict=True):
                samples[number] += found
        return samples

    def close(self) -> None:
        """Close the wrapped engine."""
        self._inner.close()

    def _portions(self, requests: Sequence[SampleRequest]) -> Iterator[list[tuple[int, SampleRequest]]]:
        """Requests with their indices, in order; a request larger than a portion is split."""
        portion: list[tuple[int, SampleRequest]] = []
        size = 0
        for number, request in enumerate(requests):
            for start in range(0, len(request.seeds_G), self._max_completions):
                seeds_G = request.seeds_G[start : start + self._max_completions]
                if size + len(seeds_G) > self._max_completions:
                    yield portion
                    portion, size = [], 0
                portion.append((number, SampleRequest(prompt_T=request.prompt_T, seeds_G=seeds_G)))
                size += len(seeds_G)
        if portion:
            yield portion


def create(context: PluginContext, policy: Any) -> InPortions:
    """The engine around `INNER_ENGINE`; `policy` is the policy that the backend shares with its engines."""
    where = context.config.place("inference.engine")
    found = resolve(context.plugins, Kind.INFERENCE_ENGINE, INNER_ENGINE, where=where)
    options = context.params if isinstance(context.params, Options) else Options()
    return InPortions(found.target(context, policy), options.max_completions)
{% if cookiecutter.form == "file" %}


PLUGIN = PluginSpec(
    name="{{ cookiecutter.name }}",
    summary="{{ cookiecutter.description }}",
    factory=create,
    params=Options,
)
{% endif %}
