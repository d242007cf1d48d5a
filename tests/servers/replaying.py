"""Two engines named by dotted path: one records what a vLLM server drew, the other gives the same tokens again."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrain.api import Deliver, LogprobRow, PluginContext, Policy, Sample, SampleRequest, SamplingParams, StopReason
from retrain.engines.vllm import create_engine


class Recording:
    """The vLLM engine, with a line in a file for each completion."""

    delivers_early = True

    def __init__(self, context: PluginContext, policy: Policy) -> None:
        self._engine = create_engine(context, policy)
        self.publish, self.metrics, self.close = self._engine.publish, self._engine.metrics, self._engine.close

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, deliver: Deliver | None = None
    ) -> list[list[Sample]]:
        groups = self._engine.sample(requests, params, deliver)
        with tape().open("a", encoding="utf-8") as stream:
            for request, group in zip(requests, groups, strict=True):
                for seed, sample in zip(request.seeds_G, group, strict=True):
                    stream.write(json.dumps([seed, sample.tokens_T.tolist(), sample.stop_reason.value]) + "\n")
        return groups


class Replaying:
    """The recorded tokens, with the log-probabilities of the model in this process."""

    def __init__(self, context: PluginContext, policy: Any) -> None:
        self._policy = policy
        lines = [json.loads(line) for line in tape().read_text(encoding="utf-8").splitlines()]
        self._known = {seed: (np.asarray(tokens), StopReason(reason)) for seed, tokens, reason in lines}

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[list[Sample]]:
        return [[self._sample(request, seed, params) for seed in request.seeds_G] for request in requests]

    def close(self) -> None:
        """Nothing is held."""

    def _sample(self, request: SampleRequest, seed: int, params: SamplingParams) -> Sample:
        tokens_T, reason = self._known[seed]
        row = LogprobRow.of(np.asarray(request.prompt_T), tokens_T)
        (logprobs_T,) = self._policy.logprobs([row], params.temperature)
        return Sample(
            tokens_T=tokens_T,
            logprobs_T=logprobs_T[row.action_T],
            stop_reason=reason,
            policy_version=self._policy.version,
        )


def tape() -> Path:
    """Where the completions stand."""
    return Path(os.environ["REPLAY_TAPE"])
