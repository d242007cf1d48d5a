"""Three stand-ins and a real vLLM, killed, stopped, slowed and confused at random while a policy is trained on them.

`nox -s fleet` runs it for `RETRAIN_FLEET_S` seconds (600), with the faults of `RETRAIN_FLEET_SEED`.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from retrain.api import (
    LogprobRow,
    PluginContext,
    SampleRequest,
    SamplingParams,
    Seeds,
    TrainBatch,
    load_plugins,
)
from retrain.kernel.config import schema
from retrain.kernel.config.plugin_tables import InferenceTable
from retrain.kernel.config.resolved import Config
from retrain.kernel.types import Sample
from retrain_local.backend import LocalBackend
from retrain_local.factory import create_backend
from retrain_local.plugin import BUILTIN_MODELS
from tests.kit.sampled_rows import sampled_rows
from tests.servers.fleet import Member, RealVllm, StandIn, python, troubled

TINY = BUILTIN_MODELS["tiny"]
EXACT, OTHER = 1e-4, 1e-3  # nats: to the version that drew a completion, and to the next one
DURATION_S = float(os.environ.get("RETRAIN_FLEET_S", "600"))
SEED = int(os.environ.get("RETRAIN_FLEET_SEED", "1"))
TEMPERATURE = 0.7
PARAMS = SamplingParams(max_tokens=24, temperature=TEMPERATURE)


def backend_on(urls: list[str]) -> LocalBackend:
    tables = {
        "model": schema.ModelTable(model="builtin:tiny", lora_rank=8),
        "backend": schema.BackendTable(devices="cpu"),
        "training": schema.TrainingTable(temperature=TEMPERATURE, lr=1e-3),
        "inference": InferenceTable(engine="vllm", url=",".join(urls), retry_s=240.0, timeout_s=60.0),
    }
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    seeds, plugins = Seeds(SEED), load_plugins()
    return create_backend(
        PluginContext(config=Config(tables=tables), seeds=seeds, plugins=plugins, tokenizer=tokenizer)
    )


def step(backend: LocalBackend, number: int, version: int) -> tuple[float, float]:
    """Sample, recompute every completion, train; the largest gap to the version, and the mean gap to the next one."""
    stream = np.random.default_rng(number)
    prompts = [stream.integers(3, 500, size=size) for size in (7, 20, 150, 400)]
    requests = [
        SampleRequest(prompt_T=p_T, seeds_G=tuple(stream.integers(0, 2**31, size=6).tolist())) for p_T in prompts
    ]
    delivered = Counter[tuple[int, int]]()

    def deliver(group: int, index: int, sample: Sample) -> None:
        delivered[group, index] += 1

    groups = backend.sample(requests, PARAMS, deliver)
    assert delivered == Counter((group, index) for group in range(4) for index in range(6)), "lost or doubled"
    assert [len(group) for group in groups] == [6] * 4
    pairs = [(prompt_T, sample) for prompt_T, group in zip(prompts, groups, strict=True) for sample in group]
    assert {sample.policy_version for _, sample in pairs} == {version}
    rows = [LogprobRow.of(prompt_T, sample.tokens_T) for prompt_T, sample in pairs]
    largest = float(max(_gaps(backend, rows, pairs)))
    backend.train(TrainBatch(step=number, rows=sampled_rows(requests, groups, stream), temperature=TEMPERATURE))
    to_next = float(np.mean(_gaps(backend, rows, pairs)))
    backend.publish()
    return largest, to_next


def _gaps(backend: LocalBackend, rows: list[LogprobRow], pairs: list[tuple[Any, Sample]]) -> list[float]:
    """Of each completion, the largest difference to the log-probabilities of the weights that are trained now."""
    ours = backend.logprobs(rows, TEMPERATURE)
    found = zip(ours, rows, pairs, strict=True)
    return [float(np.abs(all_T[row.action_T] - sample.logprobs_T).max()) for all_T, row, (_, sample) in found]


def train_on(members: list[Member], duration_s: float) -> dict[str, Any]:
    """Train on a troubled fleet; what happened."""
    figures = Counter[str]()
    with closing(backend_on([member.url for member in members])) as backend:
        with troubled(members, SEED) as counts:
            begin, number, longest_s = time.monotonic(), 0, 0.0
            while time.monotonic() - begin < duration_s:
                started = time.monotonic()
                gap, to_next = step(backend, number, version=number)
                assert gap < EXACT, f"step {number}: a completion is {gap:.2g} nats from the version that it names"
                assert to_next > OTHER, f"step {number}: another version could not be told apart"
                number, longest_s = number + 1, max(longest_s, time.monotonic() - started)
                metrics = backend.metrics()
                figures.update({name: int(value) for name, value in metrics.items() if name.startswith("inference_")})
        return {
            "seconds": round(time.monotonic() - begin),
            "steps": number,
            "completions": 24 * number,
            "longest step, s": round(longest_s, 1),
            "servers, mean": round(figures.pop("inference_servers") / number, 2),
            **figures,
            **counts,
        }


NO_VLLM = pytest.mark.skipif(not python(), reason="RETRAIN_VLLM_PYTHON names no Python with vLLM; `nox -s fleet` does")


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "has_vllm",
    [pytest.param(False, marks=pytest.mark.long), pytest.param(True, marks=[pytest.mark.server, NO_VLLM])],
    ids=["stand-ins", "and a real vLLM"],
)
def test_a_fleet_in_trouble(has_vllm: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as stack:
        members: list[Member] = [stack.enter_context(closing(StandIn(TINY))) for _ in range(3)]
        if has_vllm:
            members.append(real := stack.enter_context(closing(RealVllm(TINY, tmp_path))))
        figures = train_on(members, DURATION_S if has_vllm else min(DURATION_S, 60.0))
        if has_vllm:
            figures["answers of vLLM"] = real.num_answers()
    with capsys.disabled():
        print(json.dumps(figures))
    assert figures["inference_reloads"] > 0
