"""`[model] adapter`: a run starts from an adapter that fits, and reports the differences of one that does not."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from retrain.api import ConfigError, PluginContext, SamplingParams, TrainBatch
from retrain.kernel.config.plugin_tables import TeacherTable
from retrain_local.backend import LocalBackend
from retrain_local.checks import start_problems
from retrain_local.teacher import LocalTeacher, open_teacher
from tests.kit.local_backend import Local, saved
from tests.kit.plain_path import gradient
from tests.kit.problems import codes_in

ADAPTER = "adapter_model.safetensors"


@pytest.fixture
def folder(trained_folder: Path, tmp_path: Path) -> Path:
    """The adapter of `trained`, to be changed."""
    (tmp_path / "adapter").mkdir()
    for name in (ADAPTER, "adapter_config.json"):
        shutil.copy(trained_folder / name, tmp_path / "adapter")
    return tmp_path / "adapter"


def test_a_run_starts_with_an_adapter(trained: LocalBackend, folder: Path, local: Local, tmp_path: Path) -> None:
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
    for path in (tmp_path, tmp_path / "gone"):
        (problem,) = start_problems(local.context(adapter=path).config)
        assert problem.where == "[model] adapter (default)"


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


def teaching(context: PluginContext, **keys: Any) -> PluginContext:
    tables = {**context.config.tables, "teacher": TeacherTable(**{name: str(value) for name, value in keys.items()})}
    return replace(context, config=replace(context.config, tables=tables))


def logprobs(teacher: LocalTeacher, batch: TrainBatch) -> np.ndarray:
    return np.concatenate(teacher.logprobs(batch.rows, batch.temperature))


def test_an_adapter_teaches_what_its_run_learned(trained: LocalBackend, trained_folder: Path, local: Local) -> None:
    backend, batch, folder = trained, local.roll(trained, step=1), trained_folder
    wanted, base = (
        np.concatenate(f(batch.rows, batch.temperature)) for f in (backend.logprobs, backend.reference_logprobs)
    )
    student = local.context(rank=8, lora={"rslora": True})  # of another rank and scale than the adapter
    teacher = open_teacher(teaching(student, adapter=folder))
    assert logprobs(teacher, batch).tobytes() == wanted.tobytes()
    plain = open_teacher(teaching(student, model=student.config.model.model))
    assert logprobs(plain, batch).tobytes() == base.tobytes()
    assert np.abs(wanted - base).max() > 1e-3
    state = teacher.state()
    assert state["pack_tokens"] > 0
    plain.restore(state)
    assert plain.state() == state
    teacher.close()
    teacher.close()


def test_an_adapter_that_cannot_teach_is_told_by_its_own_key(local: Local, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        open_teacher(teaching(local.context(), adapter=tmp_path / "none"))
    assert "[teacher] adapter" in str(caught.value)
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8, "use_dora": true}')
    with pytest.raises(ConfigError) as caught:
        open_teacher(teaching(local.context(), adapter=tmp_path))
    assert codes_in(caught) == ["model.adapter-not-plain"]


def test_the_gradient_is_of_advantages_times_log_p(trained: LocalBackend, trained_folder: Path, local: Local) -> None:
    """On the samples of the policy itself: the weight is 1 there, so -sum A log p / N has the loss's gradient."""
    batch, student = local.roll(trained, step=1), local.make()
    own = student.logprobs(batch.rows, batch.temperature)
    teachers = open_teacher(teaching(local.context(), adapter=trained_folder)).logprobs(batch.rows, batch.temperature)
    rows = tuple(
        replace(row, logprobs_T=own_T, advantages_T=teacher_T - own_T)
        for row, own_T, teacher_T in zip(batch.rows, own, teachers, strict=True)
    )
    got, wanted = (gradient(student, replace(batch, rows=rows, loss=loss)) for loss in ("", "likelihood"))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-7)
    assert float(got.abs().max()) > 1e-4
