"""`[model] adapter`: a run starts from an adapter that fits, and says what differs in one that does not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from retrain.api import ConfigError, PluginContext, SampleRequest, SamplingParams, TrainBatch
from retrain_local.backend import LocalBackend
from retrain_local.checks import start_problems
from retrain_local.factory import create_backend

MakeBackend = Callable[..., LocalBackend]
MakeContext = Callable[..., PluginContext]
Roll = Callable[..., TrainBatch]
GREEDY = SamplingParams(max_tokens=8, temperature=1.0)


@pytest.fixture
def trained(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll, tmp_path: Path
) -> tuple[LocalBackend, Path]:
    """A backend after two steps, and the folder of its adapter."""
    backend = make_backend()
    for step in range(2):
        backend.train(roll(backend, requests, step=step))
        backend.publish()
    folder = tmp_path / "adapter"
    folder.mkdir()
    backend.save_adapter(folder)
    return backend, folder


def changed(folder: Path, **fields: object) -> None:
    document = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(document | fields))


def test_a_run_starts_with_the_policy_of_the_adapter(
    trained: tuple[LocalBackend, Path],
    make_backend: MakeBackend,
    requests: Sequence[SampleRequest],
    roll: Roll,
    tmp_path: Path,
) -> None:
    before, folder = trained
    started, fresh = make_backend(seed=99, adapter=folder), make_backend(seed=99)
    wanted, got, other = (backend.sample(requests, GREEDY) for backend in (before, started, fresh))
    pairs = [(a, b) for a_G, b_G in zip(wanted, got, strict=True) for a, b in zip(a_G, b_G, strict=True)]
    assert all(a.logprobs_T.tobytes() == b.logprobs_T.tobytes() for a, b in pairs)
    assert any(a.logprobs_T.tolist() != b.logprobs_T.tolist() for a, b in zip(wanted[0], other[0], strict=True))
    assert got[0][0].policy_version == 0  # it is where this run begins
    batch = roll(before, requests, step=2)
    begun = started.logprobs(batch.rows, 1.0)
    assert started.train(batch).ratio_mean == pytest.approx(1.0, abs=1e-5)
    reference = started.reference_logprobs(batch.rows, 1.0)  # that of [kl]: what training began with
    assert all(a.tobytes() == b.tobytes() for a, b in zip(reference, begun, strict=True))
    (tmp_path / "next").mkdir()
    started.save_adapter(tmp_path / "next")
    moved, was = (load_file(at / "adapter_model.safetensors") for at in (tmp_path / "next", folder))
    assert any(not moved[name].equal(was[name]) for name in was)


def test_a_run_folder_means_its_newest_checkpoint(
    trained: tuple[LocalBackend, Path], make_context: MakeContext, tmp_path: Path
) -> None:
    final = tmp_path / "run" / "adapter" / "final"
    final.parent.mkdir(parents=True)
    trained[1].rename(final)
    (final / "checkpoint.json").write_text("{}")
    assert not start_problems(make_context(adapter=tmp_path / "run").config)


@pytest.mark.parametrize(
    ("settings", "fields", "words"),
    [
        ({"rank": 8}, {}, ["lora_rank", "is 8, and the adapter in", "has rank 4", "set lora_rank = 4"]),
        ({"alpha": 3}, {}, ["alpha", "is 3", "was trained with 8", "set alpha = 8"]),
        ({}, {"use_dora": True}, ["adapter", "not plain LoRA: it sets use_dora"]),
        ({}, {"use_rslora": True}, ["rslora", "is false", "trained with use_rslora = true", "set rslora = true"]),
        ({}, {"bias": "all", "modules_to_save": ["lm_head"]}, ["it sets modules_to_save, bias"]),
        ({}, {"r": "four"}, ["adapter_config.json", "cannot be read: ValueError"]),
    ],
)
def test_what_differs_is_said_before_anything_loads(
    trained: tuple[LocalBackend, Path],
    make_context: MakeContext,
    settings: dict[str, int],
    fields: dict[str, object],
    words: list[str],
) -> None:
    changed(trained[1], **fields)
    (problem,) = start_problems(make_context(adapter=trained[1], **settings).config)
    assert all(word in str(problem) for word in words), str(problem)


def test_a_folder_without_an_adapter(make_context: MakeContext, tmp_path: Path) -> None:
    for path, what in ((tmp_path, "holds no adapter_config.json"), (tmp_path / "gone", "there is no such folder")):
        (problem,) = start_problems(make_context(adapter=path).config)
        assert what in problem.what


@pytest.mark.parametrize("damage", ["a layer missing", "another width", "NaN", "cut off"])
def test_matrices_that_do_not_fit_are_refused(
    trained: tuple[LocalBackend, Path], make_context: MakeContext, damage: str
) -> None:
    file = trained[1] / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    if damage == "a layer missing":
        del tensors[name]
    elif damage == "another width":
        tensors[name] = tensors[name][:, :-1].contiguous()
    elif damage == "NaN":
        tensors[name][0, 0] = float("nan")
    save_file(tensors, file)
    if damage == "cut off":
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError) as raised:
        create_backend(make_context(adapter=trained[1]))
    said = "cannot be read" if damage == "cut off" else name
    assert said in str(raised.value)
    assert "[model] adapter" in str(raised.value)
