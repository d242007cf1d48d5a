"""`[model] adapter`: a run starts from an adapter that fits, and reports the differences of one that does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from retrain.api import ConfigError, SamplingParams
from retrain_local.backend import LocalBackend
from retrain_local.checks import start_problems
from tests.kit.local_backend import Local, saved
from tests.kit.problems import codes_in

ADAPTER = "adapter_model.safetensors"


@pytest.fixture
def folder(trained_folder: Path, tmp_path: Path) -> Path:
    """The adapter of `trained`, to be changed."""
    (tmp_path / "adapter").mkdir()
    for name in (ADAPTER, "adapter_config.json"):
        shutil.copy(trained_folder / name, tmp_path / "adapter")
    return tmp_path / "adapter"


def test_a_run_starts_with_the_policy_of_the_adapter(
    trained: LocalBackend, folder: Path, local: Local, tmp_path: Path
) -> None:
    started, fresh = local.make(seed=99, adapter=folder), local.make(seed=99)
    params = SamplingParams(max_tokens=8, temperature=1.0)
    wanted, got, other = (
        [s.logprobs_T.tobytes() for group in backend.sample(local.requests, params) for s in group]
        for backend in (trained, started, fresh)
    )
    assert wanted == got != other
    assert started.sample(local.requests, params)[0][0].policy_version == 0  # it is where this run begins
    batch = local.roll(trained, step=2)
    begun = started.logprobs(batch.rows, 1.0)
    assert started.train(batch).ratio_mean == pytest.approx(1.0, abs=1e-5)
    reference = started.reference_logprobs(batch.rows, 1.0)  # that of [kl]: what training began with
    assert all(a.tobytes() == b.tobytes() for a, b in zip(reference, begun, strict=True))
    moved, was = (load_file(at / ADAPTER) for at in (saved(tmp_path / "next", started.save_adapter), folder))
    assert any(not moved[name].equal(was[name]) for name in was)


def test_a_run_folder_means_its_newest_checkpoint(folder: Path, local: Local, tmp_path: Path) -> None:
    final = tmp_path / "run" / "adapter" / "final"
    final.parent.mkdir(parents=True)
    folder.rename(final)
    (final / "checkpoint.json").write_text("{}")
    assert not start_problems(local.context(adapter=tmp_path / "run").config)


@pytest.mark.parametrize(
    ("settings", "fields", "where", "code", "fix"),
    [
        ({"rank": 8}, {}, "[model] lora_rank", "differs", "set lora_rank = 4"),
        ({"alpha": 3}, {}, "[lora] alpha", "differs", "set alpha = 8"),
        ({}, {"use_dora": True}, "[model] adapter", "not-plain", ""),
        ({}, {"use_rslora": True}, "[lora] rslora", "differs", "set rslora = true"),
        ({}, {"bias": "all", "modules_to_save": ["lm_head"]}, "[model] adapter", "not-plain", ""),
        ({}, {"r": "four"}, "[model] adapter", "unreadable", ""),
    ],
)
def test_a_difference_is_reported_before_anything_loads(
    folder: Path, local: Local, settings: dict[str, int], fields: dict[str, object], where: str, code: str, fix: str
) -> None:
    document = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(document | fields))
    (problem,) = start_problems(local.context(adapter=folder, **settings).config)
    assert (problem.code, problem.where) == (f"model.adapter-{code}", f"{where} (default)")
    assert problem.fix == fix or not fix


def test_a_folder_without_an_adapter_is_refused(local: Local, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "gone"):
        (problem,) = start_problems(local.context(adapter=path).config)
        assert problem.where == "[model] adapter (default)"


@pytest.mark.parametrize("damage", ["a layer missing", "another width", "NaN", "cut off"])
def test_matrices_that_do_not_fit_are_refused(folder: Path, local: Local, damage: str) -> None:
    tensors = load_file(folder / ADAPTER)
    name = sorted(tensors)[0]
    if damage == "a layer missing":
        del tensors[name]
    elif damage == "another width":
        tensors[name] = tensors[name][:, :-1].contiguous()
    elif damage == "NaN":
        tensors[name][0, 0] = float("nan")
    save_file(tensors, folder / ADAPTER)
    if damage == "cut off":
        (folder / ADAPTER).write_bytes((folder / ADAPTER).read_bytes()[:100])
    with pytest.raises(ConfigError) as caught:
        local.make(adapter=folder)
    assert codes_in(caught) == ["model.adapter-unreadable" if damage == "cut off" else "model.adapter-misfit"]
    assert damage == "cut off" or name in str(caught.value)
