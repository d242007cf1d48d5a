"""Engines for runs of the whole command: one writes down what a real one drew, the other plays it back.

Copy this file into the folder of a run and name `engine_record.recording` (around the engine in RECORDED_ENGINE, a
dotted path of its factory) or `engine_record.replaying` as `[inference] engine`. Both use `samples.jsonl` there; the
first writes `gaps.jsonl` too.
"""

import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from retrain.api import Deliver, Engine, LogprobRow, PluginContext, Policy, Sample, SampleRequest, SamplingParams
from retrain.credit.logprob_gap import measure_gap
from retrain.engines.policy_check import PROBE_TOKENS, probe_prompts
from retrain.kernel.types import Floats, StopReason

SAMPLES, GAPS = Path("samples.jsonl"), Path("gaps.jsonl")


def recording(context: PluginContext, policy: Policy) -> Engine:
    """The real engine, compared with the trainer on eight prompts of 8 to 420 tokens after each step."""
    module, _, name = os.environ["RECORDED_ENGINE"].rpartition(".")
    return _Recording(context, policy, getattr(importlib.import_module(module), name)(context, policy))


def replaying(context: PluginContext, policy: Policy) -> Engine:
    """The recorded tokens, with the log-probabilities of the training model."""
    return _Replaying(policy)


def _sampled_logprobs(sample: Sample) -> Floats:
    return sample.logprobs_T if sample.engine_logprobs_T is None else sample.engine_logprobs_T


class _Recording:
    delivers_early = True

    def __init__(self, context: PluginContext, policy: Policy, engine: Any) -> None:
        self._context, self._policy, self._engine = context, policy, engine
        self.metrics, self.close = engine.metrics, engine.close

    def publish(self) -> None:
        self._engine.publish()
        sides = SimpleNamespace(sample=self._engine.sample, logprobs=self._policy.logprobs)
        params = SamplingParams(max_tokens=PROBE_TOKENS, temperature=self._context.config.training.temperature)
        prompts = probe_prompts(self._context.tokenizer, self._policy.context_limit)
        gap = measure_gap(sides, prompts, params, reported=_sampled_logprobs)
        assert gap is not None
        _write(GAPS, {"version": self._policy.version, "gap": gap.max, "tokens": gap.num_tokens})

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, deliver: Deliver | None = None
    ) -> list[list[Sample]]:
        samples: list[list[Sample]] = self._engine.sample(requests, params, deliver)
        drawn = [[{"tokens": one.tokens_T.tolist(), "stop": str(one.stop_reason)} for one in row] for row in samples]
        _write(SAMPLES, {"version": self._policy.version, "drawn": drawn})
        return samples


def _write(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


class _Replaying:
    delivers_early = True

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lines = iter(SAMPLES.read_text(encoding="utf-8").splitlines())

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, deliver: Deliver | None = None
    ) -> list[list[Sample]]:
        drawn = json.loads(next(self._lines))["drawn"]
        samples: list[list[Sample]] = []
        for group, (request, row) in enumerate(zip(requests, drawn, strict=True)):
            prompt_T = np.asarray(request.prompt_T, dtype=np.int64)
            rows = [LogprobRow.of(prompt_T, np.asarray(one["tokens"], dtype=np.int64)) for one in row]
            found = self._policy.logprobs(rows, params.temperature)
            assert found is not None
            samples.append([])
            for index, (one, values_T, (tokens_T, action_T)) in enumerate(zip(row, found, rows, strict=True)):
                sample = Sample(
                    tokens_T=tokens_T[action_T],
                    logprobs_T=values_T[action_T],
                    stop_reason=StopReason(one["stop"]),
                    policy_version=self._policy.version,
                )
                samples[group].append(sample)
                if deliver is not None:
                    deliver(group, index, sample)
        return samples

    def close(self) -> None:
        pass
