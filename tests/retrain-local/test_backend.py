from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrain.api import (
    BackendError,
    ConfigError,
    Determinism,
    EngineTraits,
    Kind,
    PluginContext,
    PluginError,
    PluginSpec,
    Sample,
    SampleRequest,
    SamplingParams,
    Seeds,
    StopReason,
)
from retrain.kernel.registry import Owner
from retrain_local.backend import LocalBackend
from retrain_local.factory import create_backend
from retrain_local.plugin import CAPABILITIES
from tests.kit.local_backend import Local, saved
from tests.kit.problems import codes_in

PARAMS = SamplingParams(max_tokens=16, temperature=1.0)
ADAPTER = "adapter_model.safetensors"


def drawn(backend: LocalBackend, local: Local) -> list[tuple[list[int], bytes]]:
    groups = backend.sample(local.requests, PARAMS)
    return [(s.tokens_T.tolist(), s.logprobs_T.tobytes()) for group in groups for s in group]


def test_one_seed_one_run_whatever_the_global_random_state(local: Local, tmp_path: Path) -> None:
    def run(seed: int, name: str) -> tuple[Any, ...]:
        torch.manual_seed(len(name))
        before, tokens, reports = torch.get_rng_state(), [], []
        backend = local.make(seed=seed)
        for step in range(2):
            batch = local.roll(backend, step=step)
            tokens.append([row.tokens_T.tolist() for row in batch.rows])
            reports.append(backend.train(batch))
            backend.publish()
        assert torch.equal(torch.get_rng_state(), before)
        return tokens, reports, (saved(tmp_path / name, backend.save_adapter) / ADAPTER).read_bytes()

    first = run(5, "first")
    assert run(5, "again, later") == first
    assert run(6, "other")[2] != first[2]


def test_a_version_is_sampled_once_it_is_published(local: Local) -> None:
    backend = local.make()
    assert backend.capabilities == CAPABILITIES
    before, batch = drawn(backend, local), local.roll(backend)
    backend.train(batch)
    backend.train(batch)
    assert drawn(backend, local) == before
    assert backend.sample(local.requests, PARAMS)[0][0].policy_version == 0
    assert backend.publish() == 2
    assert drawn(backend, local) != before
    assert backend.sample(local.requests, PARAMS)[0][0].policy_version == 2
    backend.close()
    backend.close()
    with pytest.raises(BackendError) as caught:
        backend.sample(local.requests, PARAMS)
    assert codes_in(caught) == ["backend.closed"]


class Echo:
    """An engine of another distribution: it answers with the prompt, and keeps each adapter that is published."""

    def __init__(self, context: PluginContext, policy: Any) -> None:
        self.policy = policy
        self.published: list[tuple[int, bytes]] = []

    def publish(self) -> None:
        folder = Path(self.policy.model_path).parent / f"version-{self.policy.version}-{id(self)}-{len(self.published)}"
        self.published.append((self.policy.version, (saved(folder, self.policy.save_adapter) / ADAPTER).read_bytes()))

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[list[Sample]]:
        given = {"stop_reason": StopReason.LENGTH, "policy_version": self.policy.version}
        return [
            [Sample(tokens_T=r.prompt_T, logprobs_T=np.zeros(len(r.prompt_T)), **given) for _ in r.seeds_G]
            for r in requests
        ]

    def metrics(self) -> Mapping[str, float]:
        return {"engine_field": 1.0}

    def close(self) -> None:
        """Nothing is held."""


def test_another_engine_takes_the_pytorch_engines_place_and_gets_each_version(local: Local) -> None:
    context = local.context(inference={"engine": "echo"})
    registry = context.plugins.registries[Kind.INFERENCE_ENGINE]
    registry.add(PluginSpec(name="echo", summary="", factory=Echo), Owner(distribution="test"))
    backend: Any = create_backend(context)
    assert backend.sample(local.requests, PARAMS)[1][0].tokens_T.tolist() == local.requests[1].prompt_T.tolist()
    assert backend.publish() == 0
    backend.train(local.roll(local.make()))
    assert backend.publish() == 1
    (zero, first), (one, second) = backend._engine.published
    assert (zero, one) == (0, 1)
    assert first != second
    assert backend.metrics() == {"engine_field": 1.0}


def test_a_missing_engine_is_named(local: Local) -> None:
    with pytest.raises((PluginError, ConfigError), match=r"\[inference\] engine"):
        local.make(inference={"engine": "pytorhc"})


def test_a_backend_promises_no_more_than_its_engine() -> None:
    less = EngineTraits().limit(CAPABILITIES)
    assert less.determinism is Determinism.NONE
    assert not less.provides_entropy
    assert less.supports_checkpoint_resume
    assert EngineTraits(determinism=Determinism.EXACT, provides_entropy=True).limit(CAPABILITIES) == CAPABILITIES


def test_tiny_speaks(local: Local) -> None:
    from transformers import AutoTokenizer

    from retrain_local.plugin import BUILTIN_MODELS

    tokenizer = AutoTokenizer.from_pretrained(BUILTIN_MODELS["tiny"])
    chat = [{"role": "user", "content": "12 + 34 = ?\nPut your final answer in \\boxed{}."}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt_T = np.array(tokenizer.encode(text, add_special_tokens=False))
    request = SampleRequest(prompt_T=prompt_T, seeds_G=tuple(range(16)))
    (samples,) = local.make("builtin:tiny").sample([request], SamplingParams(max_tokens=64, temperature=1.0))
    assert sum("\\boxed{" in tokenizer.decode(s.tokens_T) for s in samples) >= 12
    assert sum(s.stop_reason is StopReason.EOS for s in samples) >= 12


def test_the_seed_of_the_initialisation_moves_only_the_adapter(local: Local, tmp_path: Path) -> None:
    base = local.context(seed=1)
    moved, other = replace(base, seeds=Seeds(1, {"lora init": 2})), local.context(seed=2)
    backends: list[Any] = [create_backend(context) for context in (base, moved, other)]
    files = [(saved(tmp_path / str(n), b.save_adapter) / ADAPTER).read_bytes() for n, b in enumerate(backends)]
    assert files[0] != files[1] == files[2]
    assert drawn(backends[0], local) == drawn(backends[1], local)  # an adapter begins as zero
