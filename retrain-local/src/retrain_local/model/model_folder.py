"""Checkpoints of all weights: a folder that transformers loads as a model, with what an exact resume needs beside."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG_FILE, MODEL_FILE = "config.json", "model.safetensors"
MASTER_FILE = "master_weights.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """What a model's folder holds beside its weights: config.json, files to copy, and the dtype of each tensor."""

    document: Mapping[str, Any]
    companions: tuple[Path, ...]
    dtypes: Mapping[str, torch.dtype]

    @property
    def is_exact(self) -> bool:
        """Whether model.safetensors holds the trained fp32 numbers themselves."""
        return all(dtype == torch.float32 for dtype in self.dtypes.values())

    @property
    def weights_file(self) -> str:
        """The file of a checkpoint that holds the trained numbers without rounding."""
        return MODEL_FILE if self.is_exact else MASTER_FILE


def save_model(files: ModelFiles, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write the trained weights as a model of transformers, in the dtypes that it came in."""
    # on the host: a GPU that is full of weights and moments has no room for another copy
    rounded = {name: tensor.cpu().to(files.dtypes[name]) for name, tensor in tensors.items()}
    save_tensors(rounded, folder / MODEL_FILE)
    text = json.dumps(dict(files.document), indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    for file in files.companions:
        shutil.copyfile(file, folder / file.name)


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write a safetensors file, in the order of the names."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    # without tensors safetensors 0.4 writes a header with metadata that it cannot read
    save_file(plain, file, metadata={"format": "pt"} if plain else None)
