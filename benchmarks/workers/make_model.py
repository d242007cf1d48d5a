"""Weights for the `config.json` in a folder: `python make_model.py FOLDER DEVICE [BASE]`.

Without BASE they are random, one file per layer. With it they are those of the model there, whose embedding gets random
rows up to the new vocabulary.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

EMBEDDING = "model.embed_tokens.weight"
STANDARD_DEVIATION = 0.02


def main() -> None:
    """Write the files and their index."""
    folder, device = Path(sys.argv[1]), torch.device(sys.argv[2])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    torch.manual_seed(0)
    if len(sys.argv) > 3 and sys.argv[3]:
        _widen(Path(sys.argv[3]), folder, config["vocab_size"])
        return
    dtype = getattr(torch, config["dtype"])
    size, total = config["num_hidden_layers"], 0
    places: dict[str, str] = {}
    for number in range(size + 1):
        shapes = _layer(config, number) if number < size else _outside(config)
        file = f"model-{number + 1:05d}-of-{size + 1:05d}.safetensors"
        tensors = {name: _random(shape, dtype, device) for name, shape in shapes.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
        places |= dict.fromkeys(shapes, file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _layer(config: dict[str, int], number: int) -> dict[str, tuple[int, ...]]:
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, query),
        "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    return {f"model.layers.{number}.{name}.weight": shape for name, shape in shapes.items()}


def _outside(config: dict[str, int]) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    return {EMBEDDING: (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype)
    return (torch.randn(shape, device=device, dtype=torch.float32) * STANDARD_DEVIATION).to(dtype).cpu()


def _widen(base: Path, folder: Path, vocabulary: int) -> None:
    tensors = load_file(base / "model.safetensors")
    known = tensors[EMBEDDING]
    extra = torch.randn(vocabulary - len(known), known.shape[1], dtype=known.dtype) * STANDARD_DEVIATION
    tensors[EMBEDDING] = torch.cat([known, extra])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
