"""Small random models and backends of them, shared by all tests that only read them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from retrain.api import SampleRequest
from retrain_local.backend import LocalBackend
from retrain_local.memory import sizes
from tests.kit.local_backend import SIZES, STOP, Local, saved, write_model
from tests.kit.local_engines import Engines


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # these models are too small to share out, least of all on a busy machine


@pytest.fixture(params=[sizes.MERGE_LIMIT, 0], ids=["merged", "low rank"])
def merge_limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A sampler holds merged matrices of small models, and both factors of an adapter of large ones."""
    monkeypatch.setattr(sizes, "MERGE_LIMIT", request.param)
    return int(request.param)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 whose end-of-sequence ids are drawn often enough to end rows at different lengths."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True, initializer_range=0.05))
    with torch.no_grad():
        model.model.embed_tokens.weight[list(STOP)] *= 2.5
    return write_model(tmp_path_factory.mktemp("qwen3"), model)


@pytest.fixture(scope="session")
def requests() -> list[SampleRequest]:
    """Five prompts of unequal length with unequal numbers of completions."""
    rng = np.random.default_rng(0)
    return [
        SampleRequest(
            prompt_T=rng.integers(0, 500, size=length),
            seeds_G=tuple(int(seed) for seed in rng.integers(0, 2**62, size=count)),
        )
        for length, count in ((7, 4), (3, 5), (12, 1), (1, 3), (9, 4))
    ]


@pytest.fixture(scope="session")
def local(model_folder: Path, requests: Sequence[SampleRequest]) -> Local:
    return Local(folder=model_folder, requests=requests)


@pytest.fixture(scope="session")
def trained_folder(local: Local, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a backend after one step, to be read only."""
    return saved(tmp_path_factory.mktemp("trained") / "state", local.trained().save)


@pytest.fixture
def trained(local: Local, trained_folder: Path) -> LocalBackend:
    """A backend whose adapter is no longer zero."""
    backend: LocalBackend = local.make()
    backend.load(trained_folder)
    return backend


@pytest.fixture(scope="session")
def engines(local: Local) -> Engines:
    rng = np.random.default_rng(5)
    requests = [
        SampleRequest(
            prompt_T=rng.integers(0, 500, size=length), seeds_G=tuple(range(100 * length, 100 * length + count))
        )
        for length, count in ((7, 4), (33, 4), (17, 1), (1, 2), (9, 3), (16, 2), (50, 2))
    ]
    return Engines(local=local, requests=requests)
