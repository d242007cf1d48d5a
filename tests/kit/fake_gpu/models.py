"""Folders of models whose weights are shapes: sparse safetensors files that take no disk space and are not read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from retrain_local.model.architecture import read_architecture
from retrain_local.model.weights import SINGLE, Reader, _shapes

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "eos_token_id": 151_645,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}


def _sizes(layers: int, hidden: int, inner: int, heads: int, **more: Any) -> dict[str, Any]:
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    return dict(zip(names, (layers, hidden, inner, heads), strict=True)) | more


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _sizes(2, 128, 384, 4, num_key_value_heads=2, head_dim=32, vocab_size=512, eos_token_id=500),
    "0.6B": _sizes(28, 1024, 3072, 16),
    "4B": _sizes(36, 2560, 9728, 32),
    "8B": _sizes(36, 4096, 12_288, 32, tie_word_embeddings=False),
}
BF16_BYTES = 2


def qwen3_folder(folder: Path, shape: str, **changes: Any) -> Path:
    """Write a folder of one of `SHAPES`; `changes` are of its config.json."""
    config = QWEN3 | SHAPES[shape] | changes
    config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    architecture = read_architecture(config)
    assert architecture is not None
    tensors = dict(_shapes(architecture, "model."))
    if architecture.is_tied:
        del tensors["lm_head.weight"]
    write_sparse(folder / SINGLE, tensors)
    return folder


def write_sparse(file: Path, tensors: Mapping[str, tuple[int, ...]]) -> None:
    """Write a safetensors file of bf16 tensors that is a header and a hole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        start, end = end, end + BF16_BYTES * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + end)


def vocabulary_of(folder: Path) -> int:
    """Return the number of tokens that are not special, below which prompts are drawn."""
    return int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]) - 10


@contextmanager
def weights_unread() -> Iterator[None]:
    """Let readers check the name and shape of a tensor, and copy a fake one in place of its numbers."""

    def read(reader: Reader, name: str, into: Tensor) -> Tensor:
        assert tuple(into.shape) == reader.shape(name), name
        return into.copy_(torch.empty(into.shape, dtype=torch.bfloat16))

    with mock.patch.object(Reader, "read", read), mock.patch.object(Reader, "dtype", return_value=torch.bfloat16):
        yield
