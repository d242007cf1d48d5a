"""Adapters as PEFT makes, names and reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from retrain_local.model.checkpoint import save_adapter
from tests.kit.local_backend import Local


def with_peft(folder: Path, *, rank: int, alpha: int, seed: int) -> Any:
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules="all-linear",
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(folder.resolve()),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(base, config).eval()


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_a_seed_draws_what_peft_draws(model_folder: Path, local: Local, rank: int) -> None:
    peft = with_peft(model_folder, rank=rank, alpha=rank, seed=11)
    expected = {name: p for name, p in peft.named_parameters() if p.requires_grad}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    pair = local.pair(model_folder, rank=rank, seed=11)
    assert torch.equal(torch.get_rng_state(), before)
    assert pair.parameters.keys() == expected.keys()
    for name, p in pair.parameters.items():
        assert p.dtype == torch.float32
        assert torch.equal(p, expected[name])
        assert bool(p.any()) == (".lora_A." in name)
    other = local.pair(model_folder, rank=rank, seed=12)
    assert any(not torch.equal(p, other.parameters[name]) for name, p in pair.parameters.items())


def test_every_linear_layer_but_the_head(model_folder: Path, local: Local) -> None:
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    linear = {name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)}
    pair = local.pair(model_folder)
    adapted = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in pair.parameters}
    assert adapted == linear - {"lm_head"}
    assert pair.total == sum(p.numel() for p in (*base.parameters(), *pair.parameters.values()))


@pytest.mark.parametrize(("alpha", "expected"), [(0, 8), (5, 5)])
def test_the_written_config_is_pefts(
    model_folder: Path, local: Local, tmp_path: Path, alpha: int, expected: int
) -> None:
    save_adapter(local.pair(model_folder, alpha=alpha), tmp_path)
    peft = with_peft(model_folder, rank=4, alpha=expected, seed=0)
    wanted = peft.peft_config["default"].to_dict() | {"inference_mode": True}
    found = LoraConfig.from_pretrained(str(tmp_path)).to_dict()
    leaves = {name.rpartition(".")[2] for name in wanted["target_modules"]}  # PEFT shortens them for many layers
    assert {**found, "target_modules": set(found["target_modules"])} == {**wanted, "target_modules": leaves}
    document = json.loads((tmp_path / "adapter_config.json").read_text())
    assert document["target_modules"] == sorted(document["target_modules"])
    assert document["lora_alpha"] == expected
