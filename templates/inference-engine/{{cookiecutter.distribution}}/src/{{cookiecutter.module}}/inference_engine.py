"""Inference engine `{{ cookiecutter.name }}`: another engine, asked for a bounded number of completions at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from retrain.api import Engine, Kind, PluginContext, Sample, SampleRequest, SamplingParams, resolve

INNER_ENGINE = "pytorch"
MAX_COMPLETIONS = 64


class InPortions:
    """Draws at most `max_completions` side by side; whole requests where they fit, so that prompts are read once."""

    def __init__(self, inner: Engine, max_completions: int) -> None:
        self._inner = inner
        self._max_completions = max_completions

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[list[Sample]]:
        """One list per request, one sample per seed, in order."""
        drawn: list[list[Sample]] = [[] for _ in requests]
        for portion in self._portions(requests):
            answers = self._inner.sample([request for _, request in portion], params)
            for (number, _), samples in zip(portion, answers, strict=True):
                drawn[number] += samples
        return drawn

    def close(self) -> None:
        """Release what the other engine holds."""
        self._inner.close()

    def _portions(self, requests: Sequence[SampleRequest]) -> Iterator[list[tuple[int, SampleRequest]]]:
        """Requests with their numbers, in order; a request that is larger than a portion is divided."""
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
    """The engine on top of `INNER_ENGINE`; `policy` is what the backend shares with its engines."""
    where = context.config.place("inference.engine")
    found = resolve(context.plugins, Kind.INFERENCE_ENGINE, INNER_ENGINE, where=where)
    return InPortions(found.target(context, policy), MAX_COMPLETIONS)
