"""A teacher in this process: exactly its model, never trained, and its advantages in the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrain.api import ConfigError, PluginContext, SampleRequest, TrainBatch
from retrain.kernel.config.plugin_tables import TeacherTable
from retrain_local.backend import LocalBackend
from retrain_local.teacher import LocalTeacher, open_teacher

MakeBackend = Callable[..., LocalBackend]
MakeContext = Callable[..., PluginContext]
Roll = Callable[..., TrainBatch]


def teaching(context: PluginContext, **keys: Any) -> PluginContext:
    tables = {**context.config.tables, "teacher": TeacherTable(**{name: str(value) for name, value in keys.items()})}
    return replace(context, config=replace(context.config, tables=tables))


@pytest.fixture
def trained(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll, tmp_path: Path
) -> tuple[LocalBackend, TrainBatch, Path]:
    """A backend after a step, what it sampled last, and the folder of its adapter."""
    backend = make_backend()
    backend.train(roll(backend, requests, step=0))
    backend.publish()
    folder = tmp_path / "adapter"
    folder.mkdir()
    backend.save_adapter(folder)
    return backend, roll(backend, requests, step=1), folder


def logprobs(teacher: LocalTeacher, batch: TrainBatch) -> np.ndarray:
    return np.concatenate(teacher.logprobs(batch.rows, batch.temperature))


def test_an_adapter_teaches_what_its_run_learned(
    trained: tuple[LocalBackend, TrainBatch, Path], make_context: MakeContext
) -> None:
    backend, batch, folder = trained
    wanted, base = (
        np.concatenate(f(batch.rows, batch.temperature)) for f in (backend.logprobs, backend.reference_logprobs)
    )
    student = make_context(rank=8, lora={"rslora": True})  # of another rank and scale than the adapter
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


def test_an_adapter_that_cannot_teach_is_told_by_its_own_key(make_context: MakeContext, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder") as caught:
        open_teacher(teaching(make_context(), adapter=tmp_path / "none"))
    assert "[teacher] adapter" in str(caught.value)
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8, "use_dora": true}')
    with pytest.raises(ConfigError, match="is not plain LoRA"):
        open_teacher(teaching(make_context(), adapter=tmp_path))


def test_the_gradient_is_that_of_the_advantages_times_log_p(
    trained: tuple[LocalBackend, TrainBatch, Path], make_backend: MakeBackend, make_context: MakeContext
) -> None:
    """On the samples of the policy itself: the weight is 1 there, so -sum A log p / N has the loss's gradient."""
    _, batch, folder = trained
    student = make_backend()
    own = student.logprobs(batch.rows, batch.temperature)
    teachers = open_teacher(teaching(make_context(), adapter=folder)).logprobs(batch.rows, batch.temperature)
    rows = tuple(
        replace(row, logprobs_T=own_T, advantages_T=teacher_T - own_T)
        for row, own_T, teacher_T in zip(batch.rows, own, teachers, strict=True)
    )
    trainer: Any = student._trainer
    trainer.accumulate(replace(batch, rows=rows))
    got = [p.grad.clone() for p in trainer.parameters.values()]
    trainer.optimizer.zero_grad()
    trainer.accumulate(replace(batch, rows=rows, loss="likelihood"))
    wanted = [p.grad for p in trainer.parameters.values()]
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
    assert max(float(p.abs().max()) for p in got) > 1e-4
