from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrain.api import (
    BackendError,
    ConfigError,
    Kind,
    PluginContext,
    PluginError,
    PluginSpec,
    Sample,
    SampleRequest,
    SamplingParams,
    Seeds,
    StopReason,
    TrainBatch,
)
from retrain.kernel.registry import Owner
from retrain_local.backend import LocalBackend
from retrain_local.factory import create_backend
from retrain_local.plugin import CAPABILITIES

MakeBackend = Callable[..., LocalBackend]
Roll = Callable[..., TrainBatch]
PARAMS = SamplingParams(max_tokens=16, temperature=1.0)


def drawn(backend: LocalBackend, requests: Sequence[SampleRequest]) -> list[tuple[list[int], bytes]]:
    groups = backend.sample(requests, PARAMS)
    return [(s.tokens_T.tolist(), s.logprobs_T.tobytes()) for group in groups for s in group]


def run(backend: LocalBackend, requests: Sequence[SampleRequest], roll: Roll, folder: Path) -> tuple[Any, ...]:
    reports, tokens = [], []
    for step in range(3):
        batch = roll(backend, requests, step=step)
        tokens.append([row.tokens_T.tolist() for row in batch.rows])
        reports.append(backend.train(batch))
        backend.publish()
    folder.mkdir()
    backend.save_adapter(folder)
    return tokens, reports, (folder / "adapter_model.safetensors").read_bytes()


def test_one_seed_one_run(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    first = run(make_backend(seed=5), requests, roll, tmp_path / "first")
    torch.manual_seed(2)
    np.random.default_rng(3)
    again = run(make_backend(seed=5), requests, roll, tmp_path / "again")
    other = run(make_backend(seed=6), requests, roll, tmp_path / "other")
    assert first == again
    assert first[2] != other[2]


def test_versions_and_publishing(make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll) -> None:
    backend = make_backend()
    assert backend.capabilities == CAPABILITIES
    before = drawn(backend, requests)
    batch = roll(backend, requests)
    backend.train(batch)
    backend.train(batch)
    assert drawn(backend, requests) == before
    assert backend.sample(requests, PARAMS)[0][0].policy_version == 0
    assert backend.publish() == 2
    assert drawn(backend, requests) != before
    assert backend.sample(requests, PARAMS)[0][0].policy_version == 2


def test_sampling_leaves_the_global_random_state_alone(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll
) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    backend = make_backend()
    backend.train(roll(backend, requests))
    assert torch.equal(torch.get_rng_state(), before)


def test_close_twice_and_use_after(make_backend: MakeBackend, requests: Sequence[SampleRequest]) -> None:
    backend = make_backend()
    backend.close()
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        backend.sample(requests, PARAMS)


class Echo:
    """An engine from elsewhere, which answers with the prompt."""

    def __init__(self, context: PluginContext, policy: Any) -> None:
        self.policy = policy

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[list[Sample]]:
        return [
            [
                Sample(
                    tokens_T=r.prompt_T,
                    logprobs_T=np.zeros(len(r.prompt_T)),
                    stop_reason=StopReason.LENGTH,
                    policy_version=self.policy.version,
                )
                for _ in r.seeds_G
            ]
            for r in requests
        ]

    def close(self) -> None:
        pass


def test_another_engine_takes_the_pytorch_engines_place(
    make_context: Callable[..., PluginContext], requests: Sequence[SampleRequest], tmp_path: Path
) -> None:
    context = make_context(inference={"engine": "echo"})
    spec = PluginSpec(name="echo", summary="", factory=Echo)
    context.plugins.registries[Kind.INFERENCE_ENGINE].add(spec, Owner(distribution="test"))
    backend = create_backend(context)
    assert backend.sample(requests, PARAMS)[1][0].tokens_T.tolist() == requests[1].prompt_T.tolist()
    backend._policies[0].save_adapter(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file()


def test_a_missing_engine_is_named(make_context: Callable[..., PluginContext]) -> None:
    with pytest.raises((PluginError, ConfigError), match=r"\[inference\] engine"):
        create_backend(make_context(inference={"engine": "pytorhc"}))


def test_tiny_speaks(make_backend: MakeBackend) -> None:
    from transformers import AutoTokenizer

    from retrain_local.plugin import BUILTIN_MODELS

    tokenizer = AutoTokenizer.from_pretrained(BUILTIN_MODELS["tiny"])
    backend = make_backend("builtin:tiny")
    chat = [{"role": "user", "content": "12 + 34 = ?\nPut your final answer in \\boxed{}."}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt_T = np.array(tokenizer.encode(text, add_special_tokens=False))
    request = SampleRequest(prompt_T=prompt_T, seeds_G=tuple(range(16)))
    (samples,) = backend.sample([request], SamplingParams(max_tokens=64, temperature=1.0))
    boxed = [s for s in samples if "\\boxed{" in tokenizer.decode(s.tokens_T)]
    assert len(boxed) >= 12
    assert sum(s.stop_reason is StopReason.EOS for s in samples) >= 12


def test_the_seed_of_the_initialisation_moves_the_adapter_alone(
    make_context: Callable[..., PluginContext], requests: Sequence[SampleRequest], tmp_path: Path
) -> None:
    base = make_context(seed=1)
    moved, other = replace(base, seeds=Seeds(1, {"lora init": 2})), make_context(seed=2)
    backends = [create_backend(context) for context in (base, moved, other)]
    files = []
    for number, backend in enumerate(backends):
        (tmp_path / str(number)).mkdir()
        backend.save_adapter(tmp_path / str(number))
        files.append((tmp_path / str(number) / "adapter_model.safetensors").read_bytes())
    assert files[0] != files[1] == files[2]
    assert drawn(backends[0], requests) == drawn(backends[1], requests)  # an adapter begins as zero
