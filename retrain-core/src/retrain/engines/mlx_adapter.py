"""Converts a PEFT adapter to MLX-LM's format: `adapters.safetensors` and its own `adapter_config.json`.

PEFT adds scale * B @ A to a weight, with A [r, in] and B [out, r]. MLX-LM stores lora_a = A^T and lora_b = B^T, with
scale = alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import save_file

from retrain.kernel.errors import BackendError, Problem

PREFIX = "base_model.model."
NAME = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
LAYER = re.compile(r".*?\blayers\.\d+\.")
ALL_LAYERS = -1
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError)
# Features that MLX-LM's LoRA lacks, with the values that mean they are off.
UNUSED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
}


def convert(source: Path, folder: Path) -> None:
    """Convert the PEFT adapter in `source` into a new folder; BackendError when it cannot be read or expressed."""
    try:
        config = json.loads((source / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = _read(source / "adapter_model.safetensors")
        weights = {}
        for name, tensor in tensors.items():
            module, side = _split(name)
            weights[f"{module}.lora_{side.lower()}"] = np.ascontiguousarray(tensor.T)
        document = _config(config, sorted({_split(name)[0] for name in tensors}))
    except (*UNREADABLE, OSError, safetensors.SafetensorError) as error:
        what = f"the adapter cannot be converted for MLX: {error}"
        raise BackendError(Problem(where=str(source), what=what, fix='use engine = "pytorch" or "vllm"')) from error
    try:
        folder.mkdir()
        save_file(weights, folder / "adapters.safetensors", metadata={"format": "mlx"})
        (folder / "adapter_config.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        what = f"the adapter for MLX cannot be written: {error.strerror or error}"
        fix = "free space there, or set [inference] adapter_dir"
        raise BackendError(Problem(where=str(folder), what=what, fix=fix)) from error


def _split(name: str) -> tuple[str, str]:
    """The module and the side, A or B, of a tensor's name."""
    found = NAME.fullmatch(name.removeprefix(PREFIX))
    if found is None:
        raise ValueError(f"it holds {name!r}, which MLX-LM does not support")
    return found["module"], found["side"]


def _config(config: dict[str, Any], modules: list[str]) -> dict[str, Any]:
    for key, unused in UNUSED.items():
        if config.get(key) not in unused:
            raise ValueError(f"its {key} is {config[key]!r}, which MLX-LM does not support")
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    return {
        "fine_tune_type": "lora",
        "num_layers": ALL_LAYERS,  # layers that the adapter lacks keep B = 0
        "lora_parameters": {
            "rank": rank,
            "scale": alpha / (math.sqrt(rank) if config.get("use_rslora") else rank),
            "dropout": 0.0,
            "keys": sorted({LAYER.sub("", module, count=1) for module in modules}),  # the same in each layer
        },
    }


def _read(file: Path) -> dict[str, np.ndarray]:
    """All tensors; bfloat16, which numpy lacks, as float32."""
    tensors = {}
    deserialize: Any = safetensors.deserialize  # untyped
    for name, info in deserialize(file.read_bytes()):
        if info["dtype"] not in DTYPES:
            raise ValueError(f"{name!r} has the type {info['dtype']}")
        array = np.frombuffer(info["data"], dtype=DTYPES[info["dtype"]]).reshape(info["shape"])
        if info["dtype"] == "BF16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        tensors[name] = array
    return tensors
