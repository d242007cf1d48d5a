"""Writes merged weights as a folder that transformers loads: safetensors in shards, config, tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from retrain_local.export.merged import MergedWeights, in_order
from retrain_local.model.model_files import Folder
from retrain_local.model.model_folder import CONFIG_FILE
from retrain_local.model.weights import INDEX, SINGLE

SHARD_BYTES = 4 * 2**30
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
STORED_AS = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
# What a model's folder may hold beside its weights and is not to be copied: other weights, and a checkpoint's state.
NOT_COPIED = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx"),
    *("adapter_config.json", "backend_state.json", "checkpoint.json", "checksums.json", "sampler_limits.json"),
    *("config.json", "README.md", ".*"),
)
MOST_COPIED_BYTES = 200 * 2**20  # of one file; a tokenizer has up to 40 MB


def write_model(weights: MergedWeights, folder: Folder, out: Path, dtype: torch.dtype) -> None:
    """Write config, companions and every tensor into an existing empty folder, at most one shard in memory."""
    document = {key: value for key, value in folder.document.items() if key != "torch_dtype"}
    _write_json(out / CONFIG_FILE, document | {"dtype": STORED_AS[dtype]})
    copy_companions(folder, out)
    shards: list[list[str]] = [[]]
    size = 0
    for name in in_order(weights.names()):
        size += weights.num_bytes(name, dtype)
        if shards[-1] and size > SHARD_BYTES:
            shards.append([])
            size = weights.num_bytes(name, dtype)
        shards[-1].append(name)
    index: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _as(weights.tensor(name), dtype) for name in names}
        save_file(tensors, out / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(weights.num_bytes(name, dtype) for name in index)
        _write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": index})


def copy_companions(folder: Folder, out: Path) -> None:
    """Copy tokenizer, chat template, generation config, licence and code of the model, not its weights."""
    source = Path(folder.source.path)
    if not source.is_dir():
        files = [*folder.companions()]
    else:
        files = [path for path in sorted(source.iterdir()) if not any(path.match(each) for each in NOT_COPIED)]
    for file in files:
        if file.is_file() and file.stat().st_size <= MOST_COPIED_BYTES:
            shutil.copyfile(file, out / file.name)


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
