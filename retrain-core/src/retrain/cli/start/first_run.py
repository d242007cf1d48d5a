"""Fits the sizes of a first run to the measured speed of this machine.

The measurement is a separate process, `python -m retrain.cli.start.first_run CONFIG`, so that a model too large ends
only that one; it reads prompts and prints the measurement, as JSON.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from retrain.cli.start.written import put_aside
from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import TrainingTable
from retrain.kernel.contracts.backend import Backend
from retrain.kernel.errors import BackendError, Problem, RetrainError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Sample, SampleRequest, SamplingParams, Tokens, TrainBatch, TrainRow
from retrain.run.backend import build_backend, choose_devices
from retrain.run.configure import load_checked
from retrain.run.opened import run_context
from retrain.text.amounts import counted
from retrain.tools.capacity.workload import evaluations

# Targets for the user are 3 and 30 minutes; the rest is for longer answers, checkpoints and a busier machine.
FIRST_STEP_S, RUN_S, TOO_LONG_S = 150.0, 1500.0, 1800.0
# Some 20 steps then fit into the time of a first run.
STEP_S = 50.0
EVALUATION_S = 60.0
MEASURING_S = 120.0  # at most
# Cut in this order, each to its floor: short answers teach more than small groups, and one prompt a step is the last.
STEP_CUTS = (
    *(("max_tokens", 512), ("group_size", 8), ("max_tokens", 256), ("batch_size", 4), ("max_tokens", 128)),
    *(("group_size", 4), ("batch_size", 2), ("max_tokens", 32), ("batch_size", 1)),
)
EVALUATION_CUTS = (("eval_samples", 2), ("eval_examples", 16), ("eval_samples", 1), ("eval_examples", 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds for a prompt's token, a decoding step, each token in it, a trained token, and to load the model.

    Prompts have about `prompt_tokens`; completions end after `mean_tokens`, the last of them after `longest_tokens`.
    """

    prefill_s: float
    decode_s: float
    sample_s: float
    train_s: float
    start_s: float
    prompt_tokens: float
    mean_tokens: float = math.inf
    longest_tokens: float = math.inf

    def sampling_s(self, prompts: int, completions: int, max_tokens: int) -> float:
        """Seconds to sample so many completions together; the prompt of a group counts once."""
        each, longest = min(self.mean_tokens, max_tokens), min(self.longest_tokens, max_tokens)
        decoding_s = longest * self.decode_s + completions * each * self.sample_s
        return prompts * self.prompt_tokens * self.prefill_s + decoding_s if completions else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The keys that determine the time of a run; `eval_every` = 0 evaluates only before and after training."""

    batch_size: int
    group_size: int
    max_tokens: int
    max_steps: int
    eval_examples: int
    eval_samples: int
    eval_every: int

    def step_s(self, speed: Speed) -> float:
        completions = self.batch_size * self.group_size
        tokens = self.batch_size * speed.prompt_tokens + completions * min(speed.mean_tokens, self.max_tokens)
        return speed.sampling_s(self.batch_size, completions, self.max_tokens) + tokens * speed.train_s

    def evaluation_s(self, speed: Speed) -> float:
        return speed.sampling_s(self.eval_examples, self.eval_examples * self.eval_samples, self.max_tokens)

    def training_s(self, speed: Speed) -> float:
        return self.max_steps * self.step_s(speed)

    def evaluations_s(self, speed: Speed) -> float:
        return evaluations(self.max_steps, self.eval_every) * self.evaluation_s(speed)

    def first_step_s(self, speed: Speed) -> float:
        """Seconds from the command to the end of the first step."""
        return speed.start_s + self.evaluation_s(speed) + self.step_s(speed)

    def run_s(self, speed: Speed) -> float:
        return speed.start_s + self.training_s(speed) + self.evaluations_s(speed)


def fit(wanted: Sizes, speed: Speed, *, keep_steps: bool = False) -> Sizes:
    """The largest sizes, none above those `wanted`, with which the first step and the run end in time.

    With `keep_steps` their number is the user's. On a machine too slow for the smallest sizes those are returned.
    """
    step_s = min(STEP_S, RUN_S / 2 / wanted.max_steps) if keep_steps else STEP_S
    sizes = wanted
    for name, floor in STEP_CUTS:
        while getattr(sizes, name) > floor and sizes.step_s(speed) > step_s:
            smaller = _halved(sizes, name, floor)
            # Completions that end long before `max_tokens` take no less time with a lower limit.
            if smaller.step_s(speed) == sizes.step_s(speed):
                break
            sizes = smaller
    evaluation_s = min(EVALUATION_S, FIRST_STEP_S - speed.start_s - sizes.step_s(speed), RUN_S / 4)
    for name, floor in EVALUATION_CUTS:
        while getattr(sizes, name) > floor and sizes.evaluation_s(speed) > evaluation_s:
            sizes = _halved(sizes, name, floor)
    # Most steps first, and for each number of them most evaluations first.
    for steps in [sizes.max_steps] if keep_steps else range(sizes.max_steps, 0, -1):
        for every in dict.fromkeys((sizes.eval_every, steps // 2, 0)):
            found = replace(sizes, max_steps=steps, eval_every=every)
            is_balanced = not every or found.evaluations_s(speed) <= found.training_s(speed) / 2
            if every < steps and is_balanced and found.run_s(speed) <= RUN_S:
                return found
    return replace(sizes, eval_every=0)


def _halved(sizes: Sizes, name: str, floor: int) -> Sizes:
    changes: dict[str, int] = {name: max(getattr(sizes, name) // 2, floor)}
    return replace(sizes, **changes)


def measured_speed(file: Path, prompts_PT: Sequence[Tokens]) -> Speed:
    """The speed of a configuration's model; BackendError if it cannot be measured. Nothing is downloaded."""
    began = time.monotonic()
    command = [sys.executable, "-m", "retrain.cli.start.first_run", str(file)]
    environ, text = {**os.environ, "HF_HUB_OFFLINE": "1"}, json.dumps([prompt_T.tolist() for prompt_T in prompts_PT])
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, check=False, timeout=MEASURING_S, env=environ
        )
    except subprocess.TimeoutExpired:
        reason = f"they took longer than {MEASURING_S:.0f} s"
    else:
        # The last line, since a library may print before it. A run's start does not include the probes.
        if not done.returncode:
            found = json.loads(done.stdout.splitlines()[-1])
            return Speed(start_s=time.monotonic() - began - found.pop("probes_s"), **found)
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    what, fix = f"two small batches could not be timed: {reason}", "try it with: retrain capacity --pilot 1"
    raise BackendError(Problem(code="init.speed-unmeasured", where="speed", what=what, fix=fix))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Values by `table.key`, empty without a measurement, the seconds that they take, and both in words."""

    text: str
    values: Mapping[str, int] = field(default_factory=dict)
    times_s: Mapping[str, float] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        return {"is_measured": bool(self.values), "text": self.text, **self.times_s}


def fit_to_machine(text: str, config: Config, prompts_PT: Sequence[Tokens], *, keep_steps: bool) -> Fitted:
    """Measure the model of the configuration in `text` on some encoded prompts, and fit the sizes of the run.

    Without prompts, because the model is still to be fetched, or where it fails to load, the sizes stay unchanged.
    """
    if not prompts_PT:
        return Fitted(text="unknown until the model is on this machine; then see: retrain capacity --pilot 3")
    try:
        with put_aside(text, "retrain.toml") as file:
            speed = measured_speed(file, prompts_PT)
    except RetrainError as error:
        return Fitted(text=f"not measured, because {error.problems[0].what}; see: retrain capacity --pilot 1")
    training, evaluation = config.training, config.eval
    wanted = Sizes(
        batch_size=training.batch_size,
        group_size=training.group_size,
        max_tokens=training.max_tokens,
        max_steps=training.max_steps,
        eval_examples=evaluation.examples,
        eval_samples=evaluation.samples,
        eval_every=evaluation.every,
    )
    sizes = fit(wanted, speed, keep_steps=keep_steps)
    times_s = {
        "run_s": sizes.run_s(speed),
        "training_s": sizes.training_s(speed),
        "evaluation_s": sizes.evaluations_s(speed),
        "first_step_s": sizes.first_step_s(speed),
    }
    values = {f"training.{name}".replace("training.eval_", "eval."): each for name, each in asdict(sizes).items()}
    run, steps, evaluations, first = (counted(max(1, math.ceil(s / 60)), "minute") for s in times_s.values())
    words = f"about {run} on this machine (measured): training {steps}, evaluation {evaluations}"
    words += f"; first step after {first}"
    if times_s["run_s"] > TOO_LONG_S:
        words += ". Fewer steps, or a smaller model, would end within 30 minutes"
    return Fitted(text=words, values=values, times_s=times_s)


# Sampling with the narrow batch; the wide one and training take a few times as long.
PROBE_S = 1.0
# Completions per prompt: two widths separate the time of a decoding step from the time of its tokens.
NARROW, WIDE = 1, 4
FEWEST_TOKENS = 5
# The first call compiles and warms caches. That is little of a longer time, and much of a shorter one.
WARM_S = 2.0
# Training that takes less is mostly overhead, and is measured again on the wide batch.
SHORT_S = 0.5


def measure(file: str, prompts: Sequence[Sequence[int]], plugins: Plugins) -> dict[str, float]:
    """All fields of `Speed` but `start_s`, and the seconds that these measurements took, as `probes_s`."""
    config = choose_devices(load_checked([file], plugins).config, plugins).config
    backend = build_backend(run_context(config, plugins, max(config.training.seed, 0)))
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
    # Noise may exceed the time of a few tokens: the floor keeps each difference positive.
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
