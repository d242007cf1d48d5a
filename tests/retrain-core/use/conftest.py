"""A policy that samples, opened once: the built-in model with its base weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from retrain.api import load_plugins
from retrain.run.opened import Opened, opened
from retrain.run.subject import find_subject


@pytest.fixture(scope="session")
def tiny() -> Iterator[Opened]:
    """`builtin:tiny` with short answers at T = 1."""
    overrides = ["--max-tokens=24", "--temperature=1.0", "--data-instruction=", "--backend=local", "--reward-type=math"]
    with opened(find_subject("builtin:tiny"), load_plugins(), overrides) as source:
        yield source


@pytest.fixture(scope="session")
def other(tiny: Opened, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that says other things than the base."""
    folder = tmp_path_factory.mktemp("adapter")
    tiny.backend.save_adapter(folder)
    weights = load_file(folder / "adapter_model.safetensors")
    stream = np.random.default_rng(0)
    changed = {n: stream.normal(0.0, 0.5, w.shape).astype(w.dtype) if "lora_B" in n else w for n, w in weights.items()}
    save_file(changed, folder / "adapter_model.safetensors")
    return folder
