"""Backends and engines under test: opened as a run opens them, with prompts to sample and batches to train on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from retrain.kernel.contracts.backend import Deliver
from retrain.kernel.declared import Capabilities, Determinism, EngineTraits, Kind
from retrain.kernel.plugins.resolve import build_part, resolve
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Sample, SampleRequest, SamplingParams, TrainBatch, TrainRow
from retrain.run.check import backend_options
from retrain.tasks.rollout import draw_samples
from retrain.testing.bench import Bench
from retrain.testing.toys import write_toy_adapter
from retrain.text.chat import encode

# Hosts the engine under test, unless the caller names another.
HOST_BACKEND = "local"
QUESTIONS = ("12 + 34 = ?", "7 * 8 = ?", "What is half of 90?")
# Completions of each. Unequal numbers show an engine that returns a rectangle of samples.
COUNTS = (4, 2, 1)
MAX_TOKENS = 12
# Tokens, log-probabilities and policy version of each completion.
Sampled = list[tuple[list[int], list[float], int]]


@dataclass(slots=True, kw_only=True, eq=False)
class ToyPolicy:
    """The policy of an engine where no backend is installed: a version, and an adapter that changes nothing."""

    model_path: str
    version: int = 0
    sampler: Any = None
    stop_ids: frozenset[int] = frozenset()
    context_limit: int | None = None
    save_adapter: Callable[[Path], None] = field(default=write_toy_adapter)


@dataclass(slots=True, kw_only=True, eq=False)
class Subject:
    """A backend (`part`, with its `capabilities`), or an engine (`part`, with the `traits` of its registration)."""

    part: Any
    version: int
    capabilities: Capabilities | None = None
    traits: EngineTraits | None = None

    @property
    def is_repeatable(self) -> bool:
        """True if a seed must reproduce its completion, as for an engine that declares nothing."""
        declared = self.capabilities or self.traits
        # Without a declaration the stricter promise holds: a forgotten declaration must not hide a fault.
        return declared is None or declared.determinism is not Determinism.NONE

    @property
    def provides_entropy(self) -> bool:
        """True if samples must have entropies when requested."""
        declared = self.capabilities or self.traits
        return declared is not None and declared.provides_entropy

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams | None = None, deliver: Deliver | None = None
    ) -> list[list[Sample]]:
        """Sample, with the checks that a run makes."""
        names = [f"request {number}" for number in range(len(requests))]
        chosen = params or SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0)
        return draw_samples(self.part, requests, chosen, names, deliver)


def open_subject(bench: Bench) -> Subject:
    """Build the backend under test; or the backend that hosts the engine under test; or that engine with a toy policy.

    The bench closes it.
    """
    if bench.kind is Kind.BACKEND:
        return backend_subject(bench)
    traits = bench.found.traits if isinstance(bench.found.traits, EngineTraits) else None
    context, config = bench.context(), bench.config
    # An engine that samples in this process needs a backend's weights; for a client of a server a toy is enough.
    if "backend" in bench.given.get("backend", {}) or bench.plugins.find(Kind.BACKEND, HOST_BACKEND):
        name, options = config.backend.backend, backend_options(config, bench.plugins)
        part = build_part(Kind.BACKEND, name, "backend.backend", context, options, "backend.options")
        # The first publish gives the engine the weights that it samples from.
        subject = Subject(part=part, version=part.publish(), traits=traits)
    else:
        policy = ToyPolicy(model_path=config.model.model, stop_ids=frozenset({bench.tokenizer.eos_token_id}))
        factory = resolve(bench.plugins, bench.kind, bench.name, where="conformance()").target
        subject = Subject(part=factory(context, policy), version=policy.version, traits=traits)
    bench.closing(subject.part.close)
    return subject


def backend_subject(bench: Bench) -> Subject:
    """Build the backend under test; the bench closes it."""
    backend = bench.build()
    bench.closing(backend.close)
    return Subject(part=backend, version=0, capabilities=backend.capabilities)


def requests(bench: Bench, counts: Sequence[int] = COUNTS) -> list[SampleRequest]:
    """Return prompts of unequal lengths through the chat template, with unequal numbers of completions."""
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    encoded = encode(chats, bench.tokenizer, bench.config.data.template_args, names=QUESTIONS)
    seeds = Seeds(0)
    return [
        SampleRequest(
            prompt_T=np.asarray(ids, dtype=np.int64),
            seeds_G=tuple(seeds.derive("conformance", number, completion) for completion in range(count)),
        )
        for number, (ids, count) in enumerate(zip(encoded, counts, strict=False))
    ]


def sampled(bench: Bench, subject: Subject) -> Sampled:
    """Sample completions of the usual prompts, as plain values."""
    return plain(subject.sample(requests(bench)))


def plain(groups: Iterable[Iterable[Sample]]) -> Sampled:
    return [
        (np.asarray(s.tokens_T).tolist(), np.asarray(s.logprobs_T).tolist(), s.policy_version)
        for group in groups
        for s in group
    ]


def batch_of(
    asked: Sequence[SampleRequest],
    samples: Sequence[Sequence[Sample]],
    credit: Callable[[Sample], Any],
    *,
    step: int = 0,
    temperature: float = 1.0,
) -> TrainBatch:
    """Return the rows of an optimizer step; `credit(sample)` is one advantage for all its tokens, or one per token."""
    rows = []
    for number, (request, group) in enumerate(zip(asked, samples, strict=True)):
        ahead = len(request.prompt_T)
        for sample in group:
            action_T = np.arange(ahead + len(sample.tokens_T)) >= ahead
            advantages_T = np.zeros(len(action_T))
            advantages_T[ahead:] = credit(sample)
            rows.append(
                TrainRow(
                    tokens_T=np.concatenate([request.prompt_T, sample.tokens_T]),
                    action_T=action_T,
                    logprobs_T=np.concatenate([np.zeros(ahead), sample.logprobs_T]),
                    advantages_T=advantages_T,
                    group=number,
                )
            )
    return TrainBatch(step=step, rows=tuple(rows), temperature=temperature)
