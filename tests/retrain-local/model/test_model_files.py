"""Files out of the hub's cache; folders and refusals are in test_loading.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

from retrain.api import ConfigError
from retrain_local.model.load import create_pair
from retrain_local.model.model_files import Source
from retrain_local.model.pair import Pair
from tests.kit.local_backend import Local

NAME = "somebody/something"


@pytest.fixture
def snapshot(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model as the hub's own client leaves it on disk."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository, revision = tmp_path / f"models--{NAME.replace('/', '--')}", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    return Path(shutil.copytree(model_folder, repository / "snapshots" / revision))


@pytest.fixture
def cached(local: Local) -> Callable[[], Pair]:
    source = Source(path=NAME, offline=True)
    return lambda: create_pair(local.context(NAME).config, source, trainer_device=torch.device("cpu"), seed=1)


def test_a_cached_model_is_read_where_it_lies(snapshot: Path, cached: Callable[[], Pair]) -> None:
    pair = cached()
    assert pair.stop_ids(None) == {500, 501}
    assert pair.adapter_config["base_model_name_or_path"] == NAME


def test_a_cached_model_of_several_files(snapshot: Path, cached: Callable[[], Pair]) -> None:
    tensors = load_file(snapshot / "model.safetensors")
    (snapshot / "model.safetensors").unlink()
    names = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in ("model-0.safetensors", "model-1.safetensors"):
        save_file({name: tensors[name] for name in names if names[name] == file}, snapshot / file)
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert cached().trained.shape.layers == 2
    (snapshot / "model-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=NAME):
        cached()


def test_no_generation_config_in_the_cache(snapshot: Path, cached: Callable[[], Pair]) -> None:
    (snapshot / "generation_config.json").unlink()
    assert cached().stop_ids(None) == frozenset()


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_what_the_cache_lacks_is_named(snapshot: Path, cached: Callable[[], Pair], missing: str) -> None:
    (snapshot / missing).unlink()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        cached()
