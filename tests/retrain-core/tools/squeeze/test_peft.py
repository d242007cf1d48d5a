"""PEFT itself loads what was compressed, on the embedded model, and computes the same with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.kernel.registry import Plugins
from retrain.squeeze import analyze_adapter, compress_adapter

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
Load = Callable[[], Any]
Save = Callable[..., Path]


@pytest.fixture
def load_base(plugins: Plugins) -> Load:
    folder = plugins.locate_model("builtin:tiny")
    if folder is None:
        pytest.skip("retrain-local is not installed")
    return lambda: transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def save_adapter(load_base: Load, tmp_path: Path) -> Save:
    """`save_adapter(r=8, ...)`: an adapter with a real update, as PEFT saves it; keywords of `LoraConfig`."""

    def save(load: Load = load_base, **settings: Any) -> Path:
        torch.manual_seed(0)
        model = peft.get_peft_model(load(), peft.LoraConfig(**{"target_modules": "all-linear", **settings}))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.1)
        model.save_pretrained(tmp_path / "adapter")
        return tmp_path / "adapter"

    return save


def logits_of(load_base: Load, adapter: Path) -> np.ndarray:
    model = peft.PeftModel.from_pretrained(load_base(), adapter).eval()
    with torch.no_grad():
        found: np.ndarray = model(torch.arange(24).reshape(2, 12)).logits.numpy()
    return found


def assert_same_at_full_rank(load: Load, adapter: Path, rank: int) -> None:
    compress_adapter(adapter, adapter.with_name("out"), rank)
    wanted, found = logits_of(load, adapter), logits_of(load, adapter.with_name("out"))
    assert np.abs(wanted - found).max() <= 1e-5 * max(1.0, float(np.abs(wanted).max()))


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 8, "lora_alpha": 5, "use_rslora": True},
        {"r": 8, "lora_alpha": 16, "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj": 1, "q_proj": 2}},
        {"r": 4, "lora_alpha": 4, "modules_to_save": ["lm_head"]},
        {"r": 4, "lora_alpha": 4, "lora_bias": True},
    ],
    ids=["rslora", "patterns", "modules-to-save", "bias"],
)
def test_at_full_rank_the_logits_are_the_same(settings: dict[str, Any], load_base: Load, save_adapter: Save) -> None:
    adapter = save_adapter(**settings)
    assert_same_at_full_rank(load_base, adapter, settings["r"])


def test_at_a_smaller_rank_every_module_is_its_best_approximation(
    load_base: Load, save_adapter: Save, tmp_path: Path
) -> None:
    adapter = save_adapter(r=8, lora_alpha=16)
    compress_adapter(adapter, tmp_path / "out", 3)
    spectra = {layer.module: layer.singular_values_R for layer in analyze_adapter(adapter).layers}
    big, small = (peft.PeftModel.from_pretrained(load_base(), folder) for folder in (adapter, tmp_path / "out"))
    smaller = dict(small.base_model.model.named_modules())
    compared = 0
    for name, module in big.base_model.model.named_modules():
        if not hasattr(module, "get_delta_weight"):
            continue
        before, after = module.get_delta_weight("default"), smaller[name].get_delta_weight("default")
        assert smaller[name].r["default"] == 3
        np.testing.assert_allclose(torch.linalg.svdvals(before)[:8].detach(), spectra[name], rtol=1e-4)
        error = float((before - after).norm().detach())
        assert error == pytest.approx(np.sqrt(np.square(spectra[name][3:]).sum()), rel=1e-3)
        compared += 1
    assert compared == len(spectra)


def test_transposed_weights(save_adapter: Save) -> None:
    """`fan_in_fan_out` (the Conv1D of GPT-2) transposes the update, not the factors."""
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=32)

    def load() -> Any:
        torch.manual_seed(1)
        return transformers.GPT2LMHeadModel(config)

    adapter = save_adapter(load, target_modules=["c_attn", "c_fc"], r=4, fan_in_fan_out=True)
    assert_same_at_full_rank(load, adapter, 4)
