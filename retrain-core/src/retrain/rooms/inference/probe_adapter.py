"""An adapter of large random numbers: a server that heeds adapters cannot answer with it as without it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from retrain.kernel.seeding import generator

WEIGHTS = "adapter_model.safetensors"
SIZE = 0.3  # standard deviation of the numbers


def write_loud(source: Path, folder: Path) -> bool:
    """Copy an adapter with every matrix replaced; False when its numbers are of a type that numpy does not have."""
    try:
        tensors = load_file(source / WEIGHTS)
    except (OSError, TypeError, KeyError, AttributeError):  # bfloat16
        return False
    stream = generator(0)
    loud = {name: (SIZE * stream.standard_normal(t.shape)).astype(t.dtype) for name, t in sorted(tensors.items())}
    folder.mkdir()
    for file in source.iterdir():
        if file.is_file() and file.name != WEIGHTS:
            shutil.copyfile(file, folder / file.name)
    save_file({name: np.ascontiguousarray(t) for name, t in loud.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    return True
