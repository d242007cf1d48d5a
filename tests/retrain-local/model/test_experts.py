"""Mixtures of experts: the experts that routers choose are counted, compared with the sampler's, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from retrain.api import BackendError, Kind, PluginSpec, TrainBatch
from retrain.kernel.registry import Owner
from retrain_local.factory import create_backend
from tests.kit.causal_types import small_model
from tests.kit.local_backend import REQUESTS, Local, saved
from tests.kit.plain_path import distance, gradient, joined, plain_gradient, plain_model
from tests.kit.problems import codes_in

KINDS = ("qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3", "granitemoehybrid", "glm4_moe", "lfm2_moe", "nemotron_h")
QUICK = ("qwen3_moe", "gpt_oss", "deepseek_v3")
EACH_KIND = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in KINDS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            small_model(kind).save_pretrained(made[kind])
        return made[kind]

    return folder


def chosen_by(model: Any, tokens_T: np.ndarray) -> list[np.ndarray]:
    """One-hot sums [T, experts] of the experts that each router of transformers' model chooses for a row."""
    found: list[np.ndarray] = []

    def note(module: Any, args: Any, out: Any) -> None:
        if "Router" in type(module).__name__:
            found.append(np.eye(out[0].shape[1])[out[2].numpy()].sum(1))

    handles = [module.register_forward_hook(note) for module in model.modules()]
    with torch.no_grad():
        model(input_ids=torch.from_numpy(tokens_T)[None])
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("kind", EACH_KIND)
def test_the_load_of_experts_is_counted_once(kind: str, local: Local, folders: Callable[[str], Path]) -> None:
    measured = []
    for checkpointing in ("off", "on"):
        backend = local.make(folders(kind), options={"gradient_checkpointing": checkpointing})
        batch = local.roll(backend, requests=REQUESTS[:1], max_tokens=6)
        backend.train(batch)
        measured.append(backend.metrics())
        assert not {name for name in backend.metrics() if name.startswith("expert")}, "nothing was trained since"
        backend.close()
    model = small_model(kind).eval()
    rows = [chosen_by(model, row.tokens_T[:-1]) for row in batch.rows]
    prompt = len(REQUESTS[0].prompt_T)  # stored once for its group
    layers = []
    for found in zip(*rows, strict=True):
        counts_E = found[0][:prompt].sum(0) + sum(each[prompt:].sum(0) for each in found)
        layers.append(counts_E / counts_E.sum())
    shares_LE = np.stack(layers)
    experts = shares_LE.shape[1]
    logs = np.log(np.where(shares_LE > 0, shares_LE, 1.0))
    for found in measured:
        assert found["expert_load_entropy"] == pytest.approx(-(shares_LE * logs).sum(1).mean() / np.log(experts))
        assert found["expert_load_max"] == pytest.approx(shares_LE.max() * experts)
        assert found["expert_unused_frac"] == pytest.approx((shares_LE == 0).mean())


def test_a_dense_model_has_no_metrics_of_experts(local: Local) -> None:
    backend = local.make()
    backend.train(local.roll(backend))
    assert not {name for name in backend.metrics() if name.startswith("expert")}


def test_routers_of_another_kind_are_not_measured_and_said(
    local: Local, folders: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="retrain"):
        backend = local.make(folders("llama4_text"))
    assert sum("experts" in message for message in caplog.messages) == 1
    backend.train(local.roll(backend, requests=REQUESTS[:1], max_tokens=4))
    assert not {name for name in backend.metrics() if name.startswith("expert")}


def with_experts(batch: TrainBatch, change: Callable[[np.ndarray], np.ndarray]) -> TrainBatch:
    rows = [replace(row, experts_TLK=change(row.experts_TLK)) for row in batch.rows]
    return replace(batch, rows=tuple(rows))


@pytest.mark.parametrize("kind", EACH_KIND)
def test_sampler_and_trainer_choose_the_same_experts(kind: str, local: Local, folders: Callable[[str], Path]) -> None:
    backend = local.make(folders(kind))
    batch = local.roll(backend, requests=REQUESTS, max_tokens=12)
    backend.train(with_experts(batch, lambda experts_TLK: experts_TLK[..., ::-1]))
    assert backend.metrics()["expert_mismatch_rate"] == 0.0, "in any order"


def test_tokens_with_other_experts_are_counted(local: Local, folders: Callable[[str], Path]) -> None:
    backend = local.make(folders("gpt_oss"))
    batch = local.roll(backend, requests=REQUESTS, max_tokens=12)
    tampered, first, last = 0, batch.rows[0], batch.rows[-1]
    experts_TLK = first.experts_TLK.copy()
    for token in (-1, -3):
        experts_TLK[token, -1] = (experts_TLK[token, -1] + 1) % 4  # in one of its layers
        tampered += set(experts_TLK[token, -1]) != set(first.experts_TLK[token, -1])
    assert tampered
    rows = (replace(first, experts_TLK=experts_TLK), *batch.rows[1:-1], replace(last, experts_TLK=None))
    backend.train(replace(batch, rows=rows))
    known = sum(row.action_T.sum() for row in rows[:-1])
    assert backend.metrics()["expert_mismatch_rate"] == pytest.approx(tampered / known)


def weights_of(kind: str, router: Any, logits_NE: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
    """The weights of given experts, as the architectures are published."""
    if kind == "gpt_oss":
        return logits_NE.gather(1, ids_NK).softmax(1)
    if kind == "deepseek_v3":
        scores = logits_NE.sigmoid().gather(1, ids_NK)
        return scores / (scores.sum(1, keepdim=True) + 1e-20) * router.routed_scaling_factor
    scores = logits_NE.softmax(1).gather(1, ids_NK)
    return scores / scores.sum(1, keepdim=True) if router.norm_topk_prob else scores


@pytest.mark.parametrize("checkpointing", ["off", "on"])
@pytest.mark.parametrize("kind", QUICK)
def test_given_experts_are_used_with_the_routers_own_weights(
    kind: str, checkpointing: str, local: Local, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    backend = local.make(folders(kind), replay_experts="on", options={"gradient_checkpointing": checkpointing})
    batch = local.roll(backend, requests=REQUESTS, max_tokens=8)
    plain, own = (
        gradient(backend, with_experts(batch, lambda experts: np.full_like(experts, -1))),
        gradient(backend, batch),
    )
    assert torch.equal(torch.as_tensor(own), torch.as_tensor(plain)), "its own choice changes nothing"

    experts = backend._pair.trained.routers.experts
    batch = with_experts(batch, lambda given: np.where(given < 0, given, (given + 1) % experts))
    given_T = iter([row.experts_TLK[1:] for row in batch.rows])
    current: list[np.ndarray] = []

    def begin(module: Any, args: Any, kwargs: Any) -> None:
        current[:] = list(next(given_T).transpose(1, 0, 2))

    def replayed(module: Any, args: Any, out: Any) -> Any:
        given = torch.from_numpy(current.pop(0)).long()
        ids_NK = torch.where(given < 0, out[2][: len(given)], given)
        ids_NK = torch.cat([ids_NK, out[2][len(given) :]])
        return out[0], weights_of(kind, module, out[0], ids_NK), ids_NK

    model = plain_model(folders(kind), saved(tmp_path / "adapter", backend.save_adapter)).eval()
    model.register_forward_pre_hook(begin, with_kwargs=True)
    for module in model.modules():
        if "Router" in type(module).__name__:
            module.register_forward_hook(replayed)
    found = gradient(backend, batch)
    assert distance(found, joined(plain_gradient(batch, model))) < 1e-4
    assert distance(found, own) > 1e-2, "others were given"
    backend.metrics()
    backend.train(batch)
    assert backend.metrics()["expert_mismatch_rate"] > 0.9, "compares with its own choice"


def test_experts_of_every_layer_are_those_of_the_layers_with_a_router(
    local: Local, folders: Callable[[str], Path]
) -> None:
    backend = local.make(folders("deepseek_v3"), replay_experts="on")
    batch = local.roll(backend, requests=REQUESTS, max_tokens=8)
    layers, own = backend._pair.trained.shape.layers, gradient(backend, batch)
    count = batch.rows[0].experts_TLK.shape[1]
    assert count < layers, "its first layer is dense"

    def of_all_layers(experts_TLK: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros_like(experts_TLK[:, : layers - count]), experts_TLK], axis=1)

    assert torch.equal(torch.as_tensor(gradient(backend, with_experts(batch, of_all_layers))), torch.as_tensor(own))


@pytest.mark.parametrize(
    "change",
    [
        lambda experts: experts[:-1],
        lambda experts: experts[:, :-1],
        lambda experts: experts[..., :-1],
        lambda experts: experts[..., 0],
        lambda experts: experts + 1000,
        lambda experts: experts - 10,
    ],
    ids=["tokens", "layers", "fewer", "flat", "unknown", "negative"],
)
def test_experts_that_the_model_cannot_have_chosen_are_refused(
    change: Callable[[np.ndarray], np.ndarray], local: Local, folders: Callable[[str], Path]
) -> None:
    backend = local.make(folders("qwen3_moe"))
    batch = local.roll(backend, requests=REQUESTS[:1], max_tokens=4)
    with pytest.raises(BackendError) as caught:
        backend.train(with_experts(batch, change))
    assert codes_in(caught) == ["backend.row-experts"]


def test_only_the_experts_of_another_engine_are_replayed_by_default(
    local: Local, folders: Callable[[str], Path]
) -> None:
    batch = local.roll(local.make(folders("gpt_oss")), requests=REQUESTS[:1], max_tokens=6)
    others = with_experts(batch, lambda given: np.where(given < 0, given, (given + 1) % 4))
    for engine, is_replayed in (("pytorch", False), ("server", True)):
        context = local.context(folders("gpt_oss"), inference={"engine": engine})
        spec = PluginSpec(name="server", summary="", factory=lambda *_: SimpleNamespace(publish=lambda: None))
        context.plugins.registries[Kind.INFERENCE_ENGINE].add(spec, Owner(distribution="test"))
        backend = create_backend(context)
        assert torch.equal(gradient(backend, batch), gradient(backend, others)) != is_replayed
