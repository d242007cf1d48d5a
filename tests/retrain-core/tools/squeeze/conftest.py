"""Adapters on disk, written by the safetensors library and by hand, not by the code under test."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

Factors = tuple[np.ndarray, np.ndarray]
FALLING = [1.0, 0.1, 0.05, 0.01]
PREFIX = "base_model.model."


@pytest.fixture
def documented_factors() -> Factors:
    """The test vector: A (4 x 6), B (5 x 4), whose product has singular values 4.215848, 3.174673, 2.031152, 0."""
    k, j = np.mgrid[0:4, 0:6]
    a = ((7 * k + 3 * j**2 + k * j) % 11 - 5) / 4
    i, j = np.mgrid[0:5, 0:4]
    return a, ((5 * i**2 + 2 * j + 3 * i * j) % 13 - 6) / 5


@pytest.fixture(scope="session")
def factors_of() -> Callable[[list[float]], Factors]:
    """Square factors whose product has exactly these singular values."""
    return lambda s: (np.eye(len(s)), np.diag(np.array(s)))


@pytest.fixture(scope="session")
def random_factors() -> Callable[..., Factors]:
    """`random_factors(seed, rank=4, inner=8, outer=6)`: A and B."""

    def draw(seed: int, rank: int = 4, inner: int = 8, outer: int = 6) -> Factors:
        stream = np.random.default_rng(seed)
        return stream.standard_normal((rank, inner)), stream.standard_normal((outer, rank))

    return draw


@pytest.fixture
def two_layers(documented_factors: Factors, factors_of: Callable[[list[float]], Factors]) -> dict[str, Factors]:
    """Layer `a` of the test vector, and `b` whose first rank keeps nearly all."""
    return {"a": documented_factors, "b": factors_of(FALLING)}


@pytest.fixture
def idle_layer() -> Factors:
    """A layer that learned nothing."""
    return np.arange(32.0).reshape(4, 8), np.zeros((6, 4))


@pytest.fixture
def make_adapter(tmp_path: Path) -> Callable[..., Path]:
    """`make_adapter({"layers.0.q_proj": (A, B)}, "name", r=4, lora_alpha=8, ...)`: a PEFT folder in `tmp_path`.

    `tensors` are added as they are; every other keyword is a key of `adapter_config.json`.
    """

    def make(
        layers: Mapping[str, Factors],
        name: str = "adapter",
        *,
        dtype: Any = np.float64,
        tensors: Mapping[str, np.ndarray] | None = None,
        **config: Any,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        content = {}
        for module, (a, b) in layers.items():
            content[f"{PREFIX}{module}.lora_A.weight"] = np.ascontiguousarray(a, dtype)
            content[f"{PREFIX}{module}.lora_B.weight"] = np.ascontiguousarray(b, dtype)
        save_file({**content, **(tensors or {})}, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        rank = max((len(a) for a, _ in layers.values()), default=1)
        document = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"], **config}
        (folder / "adapter_config.json").write_text(json.dumps(document), encoding="utf-8")
        return folder

    return make
