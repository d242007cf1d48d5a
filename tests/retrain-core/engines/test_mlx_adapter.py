"""PEFT adapters converted for MLX-LM: the same product, the same scale, or a refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

from retrain.api import BackendError
from retrain.engines.mlx import convert

CONFIG = {"r": 4, "lora_alpha": 6, "bias": "none", "use_dora": False, "use_rslora": False, "fan_in_fan_out": False}


@pytest.fixture
def write_peft(tmp_path: Path) -> Callable[..., Path]:
    def write(tensors: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
        folder = tmp_path / "peft"
        folder.mkdir()
        stream = np.random.default_rng(0)
        default = {}
        for layer in (0, 1):
            for module, (out, width) in {"self_attn.q_proj": (8, 6), "mlp.down_proj": (6, 10)}.items():
                name = f"base_model.model.model.layers.{layer}.{module}"
                default[f"{name}.lora_A.weight"] = stream.normal(size=(4, width)).astype(np.float32)
                default[f"{name}.lora_B.weight"] = stream.normal(size=(out, 4)).astype(np.float32)
        save_file(default if tensors is None else tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
        return folder

    return write


def test_an_adapter_keeps_its_product_and_scale(write_peft: Callable[..., Path], tmp_path: Path) -> None:
    source = write_peft()
    convert(source, tmp_path / "mlx")
    theirs, ours = load_file(source / "adapter_model.safetensors"), load_file(tmp_path / "mlx" / "adapters.safetensors")
    assert len(ours) == len(theirs) == 8
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        a, b = theirs[f"base_model.model.{name}.lora_A.weight"], theirs[f"base_model.model.{name}.lora_B.weight"]
        np.testing.assert_array_equal((ours[f"{name}.lora_a"] @ ours[f"{name}.lora_b"]).T, b @ a)
    config = json.loads((tmp_path / "mlx" / "adapter_config.json").read_text())
    assert config["lora_parameters"]["scale"] == 6 / 4
    assert config["lora_parameters"]["rank"] == 4
    assert config["lora_parameters"]["keys"] == ["mlp.down_proj", "self_attn.q_proj"]
    assert config["num_layers"] == -1


def test_rank_stabilised_lora_has_its_own_scale(write_peft: Callable[..., Path], tmp_path: Path) -> None:
    convert(write_peft(use_rslora=True), tmp_path / "mlx")
    config = json.loads((tmp_path / "mlx" / "adapter_config.json").read_text())
    assert config["lora_parameters"]["scale"] == 3.0


def test_bfloat16_is_read_exactly(write_peft: Callable[..., Path], tmp_path: Path) -> None:
    source = write_peft()
    tensor = torch.randn(4, 6).bfloat16()
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.lora_A.weight": tensor, f"{name}.lora_B.weight": torch.randn(8, 4).bfloat16()}
    save_torch(tensors, source / "adapter_model.safetensors")
    convert(source, tmp_path / "mlx")
    found = load_file(tmp_path / "mlx" / "adapters.safetensors")["model.layers.0.self_attn.q_proj.lora_a"]
    np.testing.assert_array_equal(found, tensor.float().numpy().T)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_dora": True}, "use_dora = True"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": None}, "cannot be converted for MLX"),
        ({"r": 0}, "cannot be converted for MLX"),
    ],
)
def test_what_mlx_cannot_express_is_refused(
    write_peft: Callable[..., Path], tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(BackendError, match=said):
        convert(write_peft(**config), tmp_path / "mlx")
    assert not (tmp_path / "mlx").exists()


def test_tensors_that_are_no_lora_are_refused(write_peft: Callable[..., Path], tmp_path: Path) -> None:
    source = write_peft({"base_model.model.lm_head.modules_to_save.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(BackendError, match="MLX-LM does not support"):
        convert(source, tmp_path / "mlx")


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff" * 64, b"[]"])
def test_unreadable_adapters_are_one_error(
    write_peft: Callable[..., Path], tmp_path: Path, file: str, content: bytes | None
) -> None:
    source = write_peft()
    (source / file).unlink()
    if content is not None:
        (source / file).write_bytes(content)
    with pytest.raises(BackendError, match="cannot be converted for MLX"):
        convert(source, tmp_path / "mlx")
