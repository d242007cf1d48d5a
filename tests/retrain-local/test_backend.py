from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from retrain.api import (
    Determinism,
    EngineTraits,
    Kind,
    PluginContext,
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
from retrain_local.memory.sizes import TOKEN_BUDGET
from retrain_local.model import load
from retrain_local.model.load import bf16_refusal
from retrain_local.plugin import CAPABILITIES
from retrain_local.sampling import schedule
from tests.kit.local_backend import SIZES, Local, saved, write_model
from tests.kit.plain_path import distance, gradient, joined, plain_gradient, plain_model
from tests.kit.problems import refused
from tests.kit.shared import first_or_long

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
            if name != "first":
                backend.logprobs(batch.rows, 0.5)  # changes nothing
            tokens.append([row.tokens_T.tolist() for row in batch.rows])
            reports.append(backend.train(batch))
            backend.publish()
        assert torch.equal(torch.get_rng_state(), before)
        return tokens, reports, (saved(tmp_path / name, backend.save_adapter) / ADAPTER).read_bytes()

    first = run(5, "first")
    assert run(5, "again, later") == first
    assert run(6, "other")[2] != first[2]


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

    def close(self) -> None: ...


def test_another_engine_gets_each_version_and_the_backend_promises_no_more_than_it(local: Local) -> None:
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
    less = EngineTraits().limit(CAPABILITIES)
    assert less.determinism is Determinism.NONE
    assert not less.provides_entropy
    assert less.supports_checkpoint_resume
    assert EngineTraits(determinism=Determinism.EXACT, provides_entropy=True).limit(CAPABILITIES) == CAPABILITIES


def test_the_seed_of_the_initialisation_moves_only_the_adapter(local: Local, tmp_path: Path) -> None:
    base = local.context(seed=1)
    moved, other = replace(base, seeds=Seeds(1, {"lora init": 2})), local.context(seed=2)
    backends: list[Any] = [create_backend(context) for context in (base, moved, other)]
    files = [(saved(tmp_path / str(n), b.save_adapter) / ADAPTER).read_bytes() for n, b in enumerate(backends)]
    assert files[0] != files[1] == files[2]
    assert drawn(backends[0], local) == drawn(backends[1], local)  # an adapter begins as zero


def bare(tokens: Any, actions: Any) -> Any:
    """A row without log-probabilities and advantages."""
    return SimpleNamespace(tokens_T=np.array(tokens), action_T=np.array(actions, bool))


def largest_gap(found: Any, wanted: Any) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("temperature", first_or_long([0.7, 1.0]))
def test_of_new_samples_they_are_the_samplers(trained: LocalBackend, local: Local, temperature: float) -> None:
    rows = local.roll(trained, step=1, temperature=temperature).rows
    sampled, found = [row.logprobs_T for row in rows], trained.logprobs(rows, temperature)
    assert largest_gap(found, sampled) < 1e-4
    assert all(f.dtype == np.float64 and not f[~row.action_T].any() for f, row in zip(found, rows, strict=True))
    assert largest_gap(trained.logprobs(rows, temperature + 0.5), sampled) > 0.1


def test_they_are_of_the_weights_that_are_trained_not_of_those_that_sample(trained: LocalBackend, local: Local) -> None:
    batch = local.roll(trained, step=1)
    before = trained.logprobs(batch.rows, 1.0)
    trained.train(batch)  # not published
    after = trained.logprobs(batch.rows, 1.0)
    assert largest_gap(after, before) > 1e-3
    gap = largest_gap(after, [row.logprobs_T for row in batch.rows])
    assert trained.train(batch).gap_max == pytest.approx(gap, abs=1e-5)


def test_neither_order_nor_cut_matters(trained: LocalBackend, local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = local.roll(trained).rows
    whole = trained.logprobs(rows, 1.0)
    trainer: Any = trained._trainer
    failures, plain = [torch.OutOfMemoryError("out of memory")], trainer._logprobs

    def short_of_memory(part: Any, temperature: float) -> torch.Tensor:
        if failures:
            raise failures.pop()
        return plain(part, temperature)

    monkeypatch.setattr(trainer, "_logprobs", short_of_memory)
    assert largest_gap(trained.logprobs(rows, 1.0), whole) < 1e-5
    assert not failures
    monkeypatch.setitem(TOKEN_BUDGET, "cpu", 40)
    trainer._limits.pack_tokens = 0
    assert largest_gap(trained.logprobs(rows[::-1], 1.0)[::-1], whole) < 1e-5


def test_actions_may_be_anywhere_and_a_row_needs_only_tokens_and_actions(trained: LocalBackend) -> None:
    tokens_T = np.array([5, 9, 2, 77, 13, 8])
    every = trained.logprobs([bare(tokens_T, [0, 1, 1, 1, 1, 1])], 1.0)[0]
    some_T = np.array([False, True, False, False, True, False])
    some = trained.logprobs([bare(tokens_T, some_T), bare(tokens_T[:1], some_T[:1])], 1.0)
    assert np.allclose(some[0], np.where(some_T, every, 0.0), atol=1e-5)
    assert some[1].tolist() == [0.0]
    assert trained.logprobs([], 1.0) == []
    for tokens, actions, code in (([1, 512], [0, 1], "unknown-token"), ([1, 2], [1, 1], "first-action")):
        row = bare(tokens, actions)
        assert refused(trained.logprobs, [row], 1.0) == [f"backend.row-{code}"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_reference_is_the_base_model_bit_for_bit_however_long_one_trains(local: Local, dtype: str) -> None:
    if dtype == "bf16" and (why := bf16_refusal()):
        pytest.skip(why)
    backend = local.make(dtype=dtype)
    batch = local.roll(backend, max_tokens=12)
    base = backend.logprobs(batch.rows, 0.7)  # B is zero
    for _ in range(2):
        backend.train(batch)
    trained = backend.logprobs(batch.rows, 0.7)
    assert largest_gap(backend.reference_logprobs(batch.rows, 0.7), base) == 0.0
    assert largest_gap(trained, base) > 1e-2
    assert largest_gap(backend.logprobs(batch.rows, 0.7), trained) == 0.0


MODES: dict[str, dict[str, Any]] = {
    "shared prefix": {},
    "prompts apart": {"inference": {"prefix_caching": False}},
    "paged": {"cache_tokens": 300},
    "small packs": {"train_tokens": 50},
    "recomputed": {"recompute": True, "pack_tokens": 1000},
    "split": {"devices": "cpu,cpu"},
}


@pytest.fixture(scope="module")
def usual_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights as large as architectures are initialised with; those of the other tests are made to disagree."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True, initializer_range=0.02))
    return write_model(tmp_path_factory.mktemp("usual"), model)


def check(local: Local, mode: str, base: Path, adapter: Path, dtype: str, tolerance: float) -> LocalBackend:
    limits = {name: value for name, value in MODES[mode].items() if name not in ("inference", "devices")}
    backend = local.make(base, dtype=dtype, **{k: v for k, v in MODES[mode].items() if k not in limits})
    for name, value in limits.items():
        setattr(backend._policies[0].limits, name, value)
    backend.train(local.roll(backend))
    backend.publish()
    batch = local.roll(backend, step=1, temperature=0.8, max_tokens=60)
    assert len({row.action_T.sum() for row in batch.rows}) > (5 if dtype == "fp32" else 2)
    backend.save_adapter(adapter)
    wanted = plain_gradient(batch, plain_model(base, adapter, load.DTYPES[dtype]))
    assert set(backend._trainer.parameters) == set(wanted)
    assert distance(gradient(backend, batch, limits.get("train_tokens", 0)), joined(wanted)) < tolerance
    report = backend.train(batch)
    assert report.gap_max < tolerance
    assert report.ratio_max == pytest.approx(1.0, abs=tolerance)
    return backend


@pytest.mark.parametrize("mode", first_or_long(MODES))
def test_ratio_and_gradient_are_the_plain_ones_in_fp32(
    local: Local, model_folder: Path, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "HEADROOM", 8)  # so that these short rows run out of blocks in their middle
    backend = check(local, mode, model_folder, tmp_path, "fp32", 1e-4)
    if mode == "paged":
        assert backend.metrics()["engine_rows_put_aside"] > 0


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_ratio_and_gradient_are_the_plain_ones_in_bf16(
    local: Local, usual_model: Path, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "has_instructions", lambda: True)  # however slow bf16 is here
    check(local, mode, usual_model, tmp_path, "bf16", 2e-2)
