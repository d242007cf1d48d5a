"""Whether sampler and trainer agree: the log-probabilities of freshly sampled tokens, from both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.serving import LogprobRow
from retrain.kernel.errors import BackendError, Problem
from retrain.kernel.plugins.build import build_part
from retrain.kernel.plugins.check import backend_options
from retrain.kernel.plugins.manager import Plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, Floats, Kind, Sample, SampleRequest, SamplingParams, Tokens
from retrain.rooms.tasks.prompts import encode_prompts
from retrain.rooms.text.tokenizer.load import load_tokenizer

MAX_TOKENS = 64
QUESTIONS = (
    "What is 17 + 25?",
    "What is 9 * 8?",
    "Solve 3x + 4 = 19 for x.",
    "How many primes are below 20?",
    "What is the area of a circle of radius 3?",
    "Simplify (a + b)^2 - (a - b)^2.",
    "A train covers 180 km in 2.5 hours. How fast is it?",
    "Name two numbers whose sum is 10 and whose product is 21.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """|logp_trainer - logp_sampler| over the sampled tokens of some prompts, in nats."""

    prompts: int
    tokens: int
    mean: float
    max: float


def measure_gap(config: Config, plugins: Plugins) -> Gap:
    """Load the model, sample one completion of at most 64 tokens per prompt, and ask the trainer about each.

    BackendError when the backend cannot tell, or tells what is not a finite number.
    """
    seeds = Seeds(max(config.training.seed, 0))
    tokenizer = load_tokenizer(config, plugins)
    context = PluginContext(config=config, seeds=seeds, plugins=plugins, tokenizer=tokenizer)
    name, options = config.backend.backend, backend_options(config, plugins)
    backend: Backend = build_part(Kind.BACKEND, name, "backend.backend", context, options, "backend.options")
    try:
        if not hasattr(backend, "logprobs"):
            what = f"backend {name!r} does not tell its trainer's log-probabilities"
            fix = "leave --logprobs out; each step of a run logs the gap as logprob_gap_mean"
            raise BackendError(Problem(where=config.place("backend.backend"), what=what, fix=fix))
        examples = [Example(id=f"doctor-{i}", prompt=text, reference="") for i, text in enumerate(QUESTIONS)]
        return _gap(backend, encode_prompts(examples, tokenizer, config), config, seeds)
    finally:
        backend.close()


def _gap(backend: Backend, prompts: list[Tokens], config: Config, seeds: Seeds) -> Gap:
    temperature = config.training.temperature
    requests = [SampleRequest(prompt_T=p_T, seeds_G=(seeds.derive("doctor", i),)) for i, p_T in enumerate(prompts)]
    params = SamplingParams(max_tokens=min(MAX_TOKENS, config.training.max_tokens), temperature=temperature)
    samples = [samples_G[0] for samples_G in backend.sample(requests, params)]
    rows = [LogprobRow.of(prompt_T, sample.tokens_T) for prompt_T, sample in zip(prompts, samples, strict=True)]
    trained = backend.logprobs(rows, temperature)
    drawn = [_engines_own(sample, config) for sample in samples]
    gaps = [new_T[row.action_T] - old_T for row, new_T, old_T in zip(rows, trained, drawn, strict=True)]
    gaps_N = np.abs(np.concatenate(gaps))
    if not len(gaps_N) or not np.isfinite(gaps_N).all():
        what = f"{np.count_nonzero(~np.isfinite(gaps_N))} of {len(gaps_N)} log-probabilities are no finite numbers"
        raise BackendError(Problem(what=what, why="of sampler or trainer", fix="try another dtype or model"))
    return Gap(prompts=len(rows), tokens=len(gaps_N), mean=float(gaps_N.mean()), max=float(gaps_N.max()))


def _engines_own(sample: Sample, config: Config) -> Floats:
    """What the engine said, even where a run takes the trainer's numbers instead: those would agree with themselves."""
    if sample.engine_logprobs_T is not None:
        return sample.engine_logprobs_T
    if config.value("inference.logprobs", "engine") == "trainer":
        what = "the engine does not say log-probabilities of the distribution that it samples from"
        why = "a run recomputes them with the training model, and each step logs the gap as engine_gap_mean"
        where, fix = config.place("inference.logprobs"), "leave --logprobs out"
        raise BackendError(Problem(where=where, what=what, why=why, fix=fix))
    return sample.logprobs_T
