"""Measures the speed of sampling and training here, in a separate process: a model too large ends only that one.

That process is `python -m retrain.cli.start.speed CONFIG`; it reads prompts and prints the measurement, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

import numpy as np

from retrain.kernel.config.schema import TrainingTable
from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import RetrainError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Sample, SampleRequest, SamplingParams, Tokens, TrainBatch, TrainRow
from retrain.run.backend import build_backend, choose_devices
from retrain.run.configure import load_checked
from retrain.run.seed_sources import run_seeds
from retrain.text.tokenizer import load_tokenizer

PROBE_S = 1.0  # of sampling with the narrow batch; the wide one and training take a few times as long
NARROW, WIDE = 1, 4  # completions per prompt: two widths tell the time of a decoding step from that of its tokens
FEWEST_TOKENS = 5
WARM_S = 2.0  # the first call compiles and warms caches, which is little of a time that is longer
SHORT_S = 0.5  # training that takes less is mostly overhead, and is measured again on the wide batch


def measure(file: str, prompts: Sequence[Sequence[int]], plugins: Plugins) -> dict[str, float]:
    """All fields of `Speed` but `start_s`, and the seconds that these measurements took, as `probes_s`."""
    config = choose_devices(load_checked([file], plugins).config, plugins).config
    seeds = run_seeds(config, max(config.training.seed, 0))
    context = PluginContext(config=config, seeds=seeds, plugins=plugins, tokenizer=load_tokenizer(config, plugins))
    backend = build_backend(context)
    prompts_PT = [np.asarray(prompt, dtype=np.int64) for prompt in prompts]
    began = time.perf_counter()
    try:
        found = _probed(backend, prompts_PT, config.training)
    finally:
        backend.close()
    return {**found, "probes_s": time.perf_counter() - began}


def _probed(backend: Backend, prompts_PT: Sequence[Tokens], training: TrainingTable) -> dict[str, float]:
    """Time one token, a narrow batch, a wide one, and training.

    Time = prefill + steps x time of a step + tokens x time of a token, solved for the two widths.
    """

    def sample(width: int, max_tokens: int) -> tuple[float, list[list[Sample]]]:
        requests = [SampleRequest(prompt_T=prompt_T, seeds_G=tuple(range(width))) for prompt_T in prompts_PT]
        since, params = time.perf_counter(), SamplingParams(max_tokens=max_tokens, temperature=training.temperature)
        samples_PG = backend.sample(requests, params)
        return time.perf_counter() - since, samples_PG

    def train(samples_PG: list[list[Sample]]) -> float:
        rows = [_row(prompts_PT[p], each, p) for p, samples_G in enumerate(samples_PG) for each in samples_G]
        since = time.perf_counter()
        backend.train(TrainBatch(step=0, rows=tuple(rows), temperature=training.temperature))
        return time.perf_counter() - since

    prefill_s = sample(NARROW, 1)[0]
    if prefill_s < WARM_S:
        prefill_s = sample(NARROW, 1)[0]
    max_tokens = FEWEST_TOKENS
    narrow_s, narrow_PG = sample(NARROW, max_tokens)
    pace_s = max(narrow_s - prefill_s, 1e-6) / (FEWEST_TOKENS - 1)
    if PROBE_S / pace_s > FEWEST_TOKENS:
        max_tokens = min(training.max_tokens, int(PROBE_S / pace_s))
        narrow_s, narrow_PG = sample(NARROW, max_tokens)
    wide_s, wide_PG = sample(WIDE, max_tokens)
    narrow, wide = _lengths(narrow_PG), _lengths(wide_PG)
    trained, train_s = narrow, train(narrow_PG)
    if train_s < SHORT_S:
        trained, train_s = wide, train(wide_PG)
    decoding_s = max(wide_s - prefill_s, 1e-6)
    longer = max(wide) / max(narrow)
    more_s, more_tokens = decoding_s - max(narrow_s - prefill_s, 1e-6) * longer, sum(wide) - sum(narrow) * longer
    sample_s = more_s / more_tokens if more_s > 0.0 and more_tokens > 0.0 else 0.0
    num_read = sum(prompt_T.size for prompt_T in prompts_PT)
    is_whole = max_tokens == training.max_tokens or max(wide) < max_tokens
    return {
        "prefill_s": prefill_s / num_read,
        "decode_s": max(decoding_s - sum(wide) * sample_s, 0.0) / max(wide),
        "sample_s": sample_s,
        "train_s": train_s / (num_read + sum(trained)),
        "prompt_tokens": num_read / len(prompts_PT),
        **({"mean_tokens": float(np.mean(wide)), "longest_tokens": max(wide)} if is_whole else {}),
    }


def _lengths(samples_PG: Sequence[Sequence[Sample]]) -> list[int]:
    return [each.tokens_T.size for samples_G in samples_PG for each in samples_G]


def _row(prompt_T: Tokens, sample: Sample, group: int) -> TrainRow:
    """A row whose advantages are not 0, so that it is trained."""
    action_T = np.arange(prompt_T.size + sample.tokens_T.size) >= prompt_T.size
    return TrainRow(
        tokens_T=np.concatenate([prompt_T, sample.tokens_T]),
        action_T=action_T,
        logprobs_T=np.concatenate([np.zeros(prompt_T.size), sample.logprobs_T]),
        advantages_T=action_T.astype(np.float64),
        group=group,
    )


def main(file: str) -> int:
    """Print the measurement of the prompts on stdin; returns 0, or the exit code of the error."""
    try:
        print(json.dumps(measure(file, json.load(sys.stdin), load_plugins())))
    except RetrainError as error:
        print(error.problems[0].what, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
