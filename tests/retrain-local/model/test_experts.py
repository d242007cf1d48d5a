"""Mixtures of experts: the experts that routers choose are counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kit.causal_types import small_model
from tests.kit.local_backend import REQUESTS, Local

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
