"""Adapters as PEFT makes, names and reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from retrain_local.decoder import Decoder
from retrain_local.model.checkpoint import save_adapter
from retrain_local.model.pair import Pair
from retrain_local.plugin import BUILTIN_MODELS

MakePair = Callable[..., Pair]
LogitsOf = Callable[[Decoder, Tensor], Tensor]
OwnLogits = Callable[[Any, Tensor], Tensor]


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
def test_a_seed_draws_what_peft_draws(model_folder: Path, make_pair: MakePair, rank: int) -> None:
    peft = with_peft(model_folder, rank=rank, alpha=rank, seed=11)
    expected = {name: p for name, p in peft.named_parameters() if p.requires_grad}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    pair = make_pair(model_folder, rank=rank, seed=11)
    assert torch.equal(torch.get_rng_state(), before)
    assert pair.parameters.keys() == expected.keys()
    for name, p in pair.parameters.items():
        assert p.dtype == torch.float32
        assert torch.equal(p, expected[name])
        assert bool(p.any()) == (".lora_A." in name)
    other = make_pair(model_folder, rank=rank, seed=12)
    assert any(not torch.equal(p, other.parameters[name]) for name, p in pair.parameters.items())


def test_every_linear_layer_but_the_head(model_folder: Path, make_pair: MakePair) -> None:
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    linear = {name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)}
    pair = make_pair(model_folder)
    adapted = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in pair.parameters}
    assert adapted == linear - {"lm_head"}
    assert pair.total == sum(p.numel() for p in (*base.parameters(), *pair.parameters.values()))


@pytest.mark.parametrize(("alpha", "expected"), [(0, 8), (5, 5)])
def test_the_written_config_is_pefts(
    model_folder: Path, make_pair: MakePair, tmp_path: Path, alpha: int, expected: int
) -> None:
    save_adapter(make_pair(model_folder, alpha=alpha), tmp_path)
    peft = with_peft(model_folder, rank=4, alpha=expected, seed=0)
    wanted = peft.peft_config["default"].to_dict() | {"inference_mode": True}
    found = LoraConfig.from_pretrained(str(tmp_path)).to_dict()
    assert {**found, "target_modules": set(found["target_modules"])} == {
        **wanted,
        "target_modules": set(wanted["target_modules"]),
    }
    document = json.loads((tmp_path / "adapter_config.json").read_text())
    assert document["target_modules"] == sorted(document["target_modules"])
    assert document["lora_alpha"] == expected


@pytest.mark.parametrize("name", ["random", "tiny"])
def test_peft_reads_the_adapter(
    name: str,
    model_folder: Path,
    make_pair: MakePair,
    own_logits: OwnLogits,
    logits_of: LogitsOf,
    shaken: Callable[[Pair], None],
    ids_N: Tensor,
    tmp_path: Path,
) -> None:
    folder = model_folder if name == "random" else BUILTIN_MODELS["tiny"]
    pair = make_pair(folder)
    shaken(pair)
    save_adapter(pair, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    theirs = {name: p for name, p in peft.named_parameters() if ".lora_" in name}
    assert theirs.keys() == pair.parameters.keys()
    assert all(torch.equal(theirs[name], p) for name, p in pair.parameters.items())
    assert load_file(tmp_path / "adapter_model.safetensors").keys() == pair.adapter.keys()
    with torch.no_grad():
        found, expected = logits_of(pair.trained, ids_N), own_logits(peft, ids_N)
    assert float((found - expected).norm() / expected.norm()) < 1e-5
