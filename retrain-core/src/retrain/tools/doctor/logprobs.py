"""Whether sampler and trainer agree on the log-probabilities of freshly sampled tokens."""

from __future__ import annotations

import math

from retrain.credit.logprob_gap import LogprobGap, measure_gap
from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import BackendError, Problem
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Example, Floats, Sample, SamplingParams
from retrain.run.backend import build_backend
from retrain.run.seed_sources import run_seeds
from retrain.tasks.prompts import encode_prompts
from retrain.text.tokenizer.load import load_tokenizer

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


def logprob_gap(config: Config, plugins: Plugins) -> LogprobGap:
    """Load the model, sample one completion of at most 64 tokens per question, and compare it with the trainer.

    BackendError when the backend does not report its trainer's log-probabilities, or one of them is not finite.
    """
    seeds = run_seeds(config, max(config.training.seed, 0))
    tokenizer = load_tokenizer(config, plugins)
    context = PluginContext(config=config, seeds=seeds, plugins=plugins, tokenizer=tokenizer)
    backend, training = build_backend(context), config.training
    try:
        examples = [Example(id=f"doctor-{i}", prompt=text, reference="") for i, text in enumerate(QUESTIONS)]
        gap = measure_gap(
            backend,
            encode_prompts(examples, tokenizer, config),
            SamplingParams(max_tokens=min(MAX_TOKENS, training.max_tokens), temperature=training.temperature),
            seeds=[seeds.derive("doctor", i) for i in range(len(QUESTIONS))],
            reported=lambda sample: _sampler_logprobs(sample, config),
        )
    finally:
        backend.close()
    if gap is None:
        what = f"backend {config.backend.backend!r} does not report its trainer's log-probabilities"
        fix = "leave --logprobs out; each step of a run logs the gap as logprob_gap_mean"
        raise BackendError(Problem(where=config.place("backend.backend"), what=what, fix=fix))
    if math.isnan(gap.mean):
        what = "some log-probabilities of sampler or trainer are not finite"
        raise BackendError(Problem(what=what, fix="try another dtype or model"))
    return gap


def _sampler_logprobs(sample: Sample, config: Config) -> Floats:
    """What the engine reported; recomputed log-probabilities come from the trainer and would agree with themselves."""
    if sample.engine_logprobs_T is not None:
        return sample.engine_logprobs_T
    if config.inference.logprobs == "trainer":
        what = "the engine does not report log-probabilities of the distribution that it samples from"
        why = "a run recomputes them with the training model, and each step logs the gap as engine_gap_mean"
        where, fix = config.place("inference.logprobs"), "leave --logprobs out"
        raise BackendError(Problem(where=where, what=what, why=why, fix=fix))
    return sample.logprobs_T
