"""The trainer's adapter under PEFT's names: the same numbers, and refused where PEFT would ignore all of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from retrain.api import BackendError
from retrain_prime_rl.trainer_folder import copy_adapter

MODULE = "model.layers.0.self_attn.q_proj"
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    return folder


def written(folder: Path, *, module: str = MODULE, b: float = 1.0, width: int = 8) -> Path:
    """An adapter as the trainer broadcasts it."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    factors = {
        f"{module}.lora_A.weight": np.arange(4 * width, dtype=np.float32).reshape(4, width) / (4 * width),
        f"{module}.lora_B.weight": np.full((width, 4), b, np.float32),
    }
    save_file(factors, folder / "adapter_model.safetensors")
    return folder


def base(folder: Path, name: str = f"{MODULE}.weight") -> str:
    folder.mkdir()
    save_file({name: np.zeros((8, 8), np.float32)}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
def test_names_get_the_prefix_once_and_the_numbers_stay(tmp_path, target, prefix):
    source = written(tmp_path / "source", module=prefix + MODULE)
    copy_adapter(source, target, base(tmp_path / "base"))
    theirs = load_file(source / "adapter_model.safetensors")
    ours = load_file(target / "adapter_model.safetensors")
    assert sorted(ours) == [f"base_model.model.{MODULE}.lora_{side}.weight" for side in "AB"]
    for name, tensor in ours.items():
        assert (tensor == theirs[prefix + name.removeprefix("base_model.model.")]).all()
    assert json.loads((target / "adapter_config.json").read_text()) == CONFIG


def test_an_adapter_that_fits_no_module_is_refused_once_it_has_values(tmp_path, target):
    model = base(tmp_path / "base", "transformer.wte.weight")
    copy_adapter(written(tmp_path / "new", b=0.0), target, model)  # as it was created
    with pytest.raises(BackendError, match="would change nothing in PEFT"):
        copy_adapter(written(tmp_path / "trained"), target, model)


def test_a_base_model_that_is_not_here_is_no_reason_to_refuse(tmp_path, target):
    copy_adapter(written(tmp_path / "trained"), target, "nobody/no-such-model")
    assert (target / "adapter_model.safetensors").is_file()


def test_names_before_the_layers_may_differ_as_they_do_in_models_of_images(tmp_path, target):
    source = written(tmp_path / "source", module="model.language_model.layers.0.self_attn.q_proj")
    copy_adapter(source, target, base(tmp_path / "base", f"language_model.{MODULE}.weight"))


@pytest.mark.parametrize("content", [{}, {"model.norm.weight": np.ones(3, np.float32)}])
def test_a_file_without_factors_is_refused(tmp_path, target, content):
    source = written(tmp_path / "source")
    save_file(content, source / "adapter_model.safetensors")
    with pytest.raises(BackendError, match="would change nothing"):
        copy_adapter(source, target, base(tmp_path / "base"))


def test_peft_applies_what_was_copied(tmp_path, target):
    pytest.importorskip("retrain_local", reason="the tiny model comes with retrain-local")
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from retrain_local.plugin import BUILTIN_MODELS

    tiny, source = str(BUILTIN_MODELS["tiny"]), written(tmp_path / "source", width=128)
    (source / "adapter_config.json").write_text(json.dumps(CONFIG | {"layers_to_transform": [0]}), encoding="utf-8")
    copy_adapter(source, target, tiny)
    model, prompt = AutoModelForCausalLM.from_pretrained(tiny), torch.tensor([[5, 9, 12]])
    with torch.no_grad():
        before = model(prompt).logits
        after = PeftModel.from_pretrained(model, target)(prompt).logits
    assert float((after - before).abs().max()) > 0.1
