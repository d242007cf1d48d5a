"""Measures how fast a model samples and trains here, in a separate process: a model too large ends only that one.

That process is `python -m retrain.cli.start.speed CONFIG`; it reads prompts and prints the measurement, as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retrain.cli.start.first_run import Speed
from retrain.kernel.config.schema import TrainingTable
from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import BackendError, Problem, RetrainError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Sample, SampleRequest, SamplingParams, Tokens, TrainBatch, TrainRow
from retrain.run.backend import build_backend
from retrain.run.configure import load_checked
from retrain.run.devices import choose_devices
from retrain.run.seed_sources import run_seeds
from retrain.text.tokenizer import load_tokenizer

LIMIT_S = 120.0
PROBE_S = 1.0  # of sampling with the narrow batch; the wide one and training take a few times as long
NARROW, WIDE = 1, 4  # completions per prompt: two widths tell the time of a decoding step from that of its tokens
FEWEST_TOKENS = 5
WARM_S = 2.0  # the first call compiles and warms caches, which is little of a time that is longer
SHORT_S = 0.5  # training that takes less is mostly overhead, and is measured again on the wide batch


def measured_speed(file: Path, prompts_PT: Sequence[Tokens]) -> Speed:
    """The speed of a configuration's model; BackendError if it cannot be measured. Nothing is downloaded."""
    began = time.monotonic()
    command = [sys.executable, "-m", "retrain.cli.start.speed", str(file)]
    environ, text = {**os.environ, "HF_HUB_OFFLINE": "1"}, json.dumps([prompt_T.tolist() for prompt_T in prompts_PT])
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, check=False, timeout=LIMIT_S, env=environ
        )
    except subprocess.TimeoutExpired:
        what = f"two small batches took longer than {LIMIT_S:.0f} s"
    else:
        if not done.returncode:
            found = json.loads(done.stdout.splitlines()[-1])
            return Speed(start_s=time.monotonic() - began - found.pop("probes_s"), **found)
        what = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]
    raise BackendError(Problem(where="speed", what=what, fix="try it with: retrain capacity --pilot 1"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """What was sampled and trained, and how long it took: one token, the narrow batch, the wide one, and training."""

    prefill_s: float
    narrow_s: float
    wide_s: float
    train_s: float
    narrow_PG: list[list[Sample]]
    wide_PG: list[list[Sample]]
    trained_PG: list[list[Sample]]
    max_tokens: int


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
    return {**_speed(found, prompts_PT, config.training), "probes_s": time.perf_counter() - began}


def _probed(backend: Backend, prompts_PT: Sequence[Tokens], training: TrainingTable) -> Probes:
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
    trained_PG, train_s = narrow_PG, train(narrow_PG)
    if train_s < SHORT_S:
        trained_PG, train_s = wide_PG, train(wide_PG)
    return Probes(
        prefill_s=prefill_s,
        narrow_s=narrow_s,
        wide_s=wide_s,
        train_s=train_s,
        narrow_PG=narrow_PG,
        wide_PG=wide_PG,
        trained_PG=trained_PG,
        max_tokens=max_tokens,
    )


def _speed(found: Probes, prompts_PT: Sequence[Tokens], training: TrainingTable) -> dict[str, float]:
    """Time = prefill + steps x time of a step + tokens x time of a token, solved for the two widths."""
    narrow, wide = _lengths(found.narrow_PG), _lengths(found.wide_PG)
    prompt_tokens = float(np.mean([prompt_T.size for prompt_T in prompts_PT]))
    narrow_s, wide_s = max(found.narrow_s - found.prefill_s, 1e-6), max(found.wide_s - found.prefill_s, 1e-6)
    more_s = wide_s - narrow_s * max(wide) / max(narrow)
    more_tokens = sum(wide) - sum(narrow) * max(wide) / max(narrow)
    sample_s = more_s / more_tokens if more_s > 0.0 and more_tokens > 0.0 else 0.0
    is_whole = found.max_tokens == training.max_tokens or max(wide) < found.max_tokens
    return {
        "prefill_s": found.prefill_s / (len(prompts_PT) * prompt_tokens),
        "decode_s": max(wide_s - sum(wide) * sample_s, 0.0) / max(wide),
        "sample_s": sample_s,
        "train_s": found.train_s / (len(prompts_PT) * prompt_tokens + sum(_lengths(found.trained_PG))),
        "prompt_tokens": prompt_tokens,
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
