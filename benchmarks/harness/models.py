"""Models of any size, without a download: the built-in one with changes, or random weights of a known shape."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from retrain.api import load_plugins

MAKER = Path(__file__).parents[1] / "workers/make_model.py"
POSITIONS = 4096
NEVER = "<|never|>"  # an end of sequence that the model has no logit for
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {},  # builtin:tiny with its own weights
    "qwen3-0.6b": QWEN3
    | {"num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
    "qwen3-4b": QWEN3
    | {"num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32},
}


def builtin_folder() -> Path:
    """Where `builtin:tiny` is installed."""
    located = load_plugins().notify("retrain_locate_model", model="builtin:tiny")
    if not located:
        sys.exit("builtin:tiny is missing: pip install ./retrain-local")
    return Path(located)


def endless_model(folder: Path, *, shape: str = "tiny", vocabulary: int = 0, device: str = "cpu") -> Path:
    """A model whose completions never end by themselves, so that all contenders draw exactly as many tokens.

    `vocabulary` replaces the shape's; entries and embeddings without a meaning fill it up. Shape `tiny` keeps the
    built-in weights; any other has random ones, in bf16, made on `device`.
    """
    folder.mkdir(parents=True)
    base = builtin_folder()
    config = json.loads((base / "config.json").read_text(encoding="utf-8")) | SHAPES[shape]
    if SHAPES[shape]:
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    size = vocabulary or config["vocab_size"]
    is_larger = shape != "tiny" or size != config["vocab_size"]
    config |= {"vocab_size": size, "eos_token_id": None, "max_position_embeddings": POSITIONS}
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {"do_sample": False, "pad_token_id": 0})
    _write_tokenizer(base, folder, size)
    if is_larger:
        weights = str(base) if shape == "tiny" else ""
        subprocess.run([sys.executable, str(MAKER), str(folder), device, weights], check=True)
    else:
        shutil.copy(base / "model.safetensors", folder)
    return folder


def _write_tokenizer(base: Path, folder: Path, size: int) -> None:
    tokenizer = json.loads((base / "tokenizer.json").read_text(encoding="utf-8"))
    known = tokenizer["model"]["vocab"]
    known |= {f"<|filler{at}|>": at for at in range(len(known), size)}
    tokenizer["added_tokens"].append(dict(tokenizer["added_tokens"][0], id=size, content=NEVER))
    _write(folder / "tokenizer.json", tokenizer)
    settings = json.loads((base / "tokenizer_config.json").read_text(encoding="utf-8"))
    _write(folder / "tokenizer_config.json", settings | {"eos_token": NEVER, "model_max_length": POSITIONS})


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")
