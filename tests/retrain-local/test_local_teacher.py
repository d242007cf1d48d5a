"""A teacher in this process: exactly its model, never trained, and its advantages in the loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrain.api import ConfigError, PluginContext, TrainBatch
from retrain.kernel.config.plugin_tables import TeacherTable
from retrain_local.backend import LocalBackend
from retrain_local.teacher import LocalTeacher, open_teacher
from tests.kit.local_backend import Local
from tests.kit.plain_path import gradient
from tests.kit.problems import codes_in


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


def test_the_gradient_is_that_of_the_advantages_times_log_p(
    trained: LocalBackend, trained_folder: Path, local: Local
) -> None:
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
