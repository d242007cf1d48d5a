"""Every way of sampling and training against the plain one: a row at a time through transformers and PEFT.

fp32: the on-policy ratio and the gradient to 1e-4; bf16: to 2e-2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from retrain_local.backend import LocalBackend
from retrain_local.model import load
from retrain_local.sampling import schedule
from tests.kit.local_backend import SIZES, Local, write_model
from tests.kit.plain_path import distance, gradient, joined, plain_gradient, plain_model
from tests.kit.shared import first_or_long

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
