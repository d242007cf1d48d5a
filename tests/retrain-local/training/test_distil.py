"""The distillation term: the shared vectors with their gradients, rows without a teacher, the weights that teach."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from retrain.api import DistilTable, TrainRow
from retrain.kernel.types import TeacherRow
from retrain_local.training.distil import distilled, divergences
from retrain_local.training.head import logprobs_and_divergences
from retrain_local.training.packs import ActionTokens

VECTORS = json.loads((Path(__file__).parents[2] / "turns_and_self_distillation.json").read_text("utf-8"))
VECTORS = VECTORS["self_distillation"]
STUDENT, TEACHER = (torch.tensor(VECTORS[f"{who}_logits"][0], dtype=torch.float64) for who in ("student", "teacher"))
IDS = torch.tensor(VECTORS["ids"][0])


def named(name: str) -> DistilTable:
    """The settings that the name of a vector spells, such as `top 2, alpha 0.5, tail True`."""
    parts = dict(part.split(" ") for part in name.split(", ") if " " in part)
    is_top = "top" in parts
    keys: dict[str, Any] = {"top_k": int(parts["top"]), "tail": parts["tail"] == "True"} if is_top else {}
    return DistilTable(mode="topk" if is_top else "full", alpha=float(parts["alpha"]), **keys)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", [name for name in VECTORS if "alpha" in name])
def test_divergences_have_the_shared_vectors(name: str, dtype: torch.dtype) -> None:
    found = divergences(named(name), STUDENT.to(dtype).log_softmax(-1), TEACHER.to(dtype).log_softmax(-1))
    assert found.tolist() == pytest.approx(VECTORS[name][0], abs=1e-9 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("name", [name for name in VECTORS if "alpha" in name])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_through_the_head_is_the_one_of_the_formula(name: str, temperature: float) -> None:
    head = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    student, teacher, settings = STUDENT.float(), TEACHER.float(), named(name)
    hidden = student.clone().requires_grad_()
    compare = partial(divergences, settings)
    logprobs, found = logprobs_and_divergences(hidden, teacher, IDS, compare, lambda x: x @ head.T, 4, temperature)
    (logprobs * torch.tensor([2.0, -1.0]) + found * torch.tensor([0.5, 3.0])).sum().backward()
    plain = student.clone().requires_grad_()
    ours, theirs = ((x @ head.T / temperature).log_softmax(-1) for x in (plain, teacher))
    picked = ours.gather(1, IDS[:, None])[:, 0]
    wanted = divergences(settings, ours, theirs)
    (picked * torch.tensor([2.0, -1.0]) + wanted * torch.tensor([0.5, 3.0])).sum().backward()
    torch.testing.assert_close(found, wanted.detach())
    torch.testing.assert_close(hidden.grad, plain.grad)


def rows_of(teachers: list[Any], old: list[float]) -> list[TrainRow]:
    zeros_T, action_T = np.zeros(3), np.array([False, True, True])
    return [
        TrainRow(
            tokens_T=np.arange(3),
            action_T=action_T,
            logprobs_T=np.array([0.0, *old]),
            advantages_T=zeros_T,
            teacher=None if given is None else TeacherRow(np.arange(3), action_T, np.array(given)),
        )
        for given in teachers
    ]


def term(table: DistilTable, new: Tensor, rows: list[TrainRow], given: Tensor | None = None) -> Tensor:
    return distilled(table, new, ActionTokens.of(range(len(rows)), rows, dtype=torch.float64), rows, given)


def test_the_sampled_token_has_the_shared_vectors() -> None:
    logits = STUDENT.clone().requires_grad_()
    new = logits.log_softmax(-1).gather(1, IDS[:, None])[:, 0]
    theirs = TEACHER.log_softmax(-1).gather(1, IDS[:, None])[:, 0]
    rows = rows_of([theirs.tolist()], new.tolist())
    wanted = VECTORS["sampled_token"]
    value = term(DistilTable(), new, rows)
    assert value.item() == pytest.approx(np.mean(wanted["loss"][0]), abs=1e-9)
    value.backward()
    assert logits.grad is not None
    # of a mean over two tokens
    assert (2 * logits.grad).flatten().tolist() == pytest.approx(np.ravel(wanted["gradient"][0]), abs=1e-9)


def test_a_row_without_a_teacher_counts_zero_and_first_tokens_are_skipped() -> None:
    new = torch.tensor([-1.0, -2.0, -0.5, -0.1], dtype=torch.float64)
    rows = rows_of([[-0.5, -1.0], None], [-1.0, -2.0])
    both = (-0.5 * -1.0 + -1.0 * -2.0) / 2
    assert term(DistilTable(ratio_cap=0.0), new, rows).item() == pytest.approx(both)
    assert term(DistilTable(ratio_cap=0.0, skip_tokens=1), new, rows).item() == pytest.approx(2.0)
    assert term(DistilTable(skip_tokens=2), new, rows).item() == 0.0


def test_the_ratio_to_the_sampler_is_capped_and_has_no_gradient() -> None:
    new = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    rows = rows_of([[-2.0, -2.0]], [-4.0, 0.0])
    value = term(DistilTable(), new, rows)
    assert value.item() == pytest.approx(-(2.0 + np.exp(-1.0)) / 2)
    value.backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([1.0, np.exp(-1.0) / 2])
    given = torch.tensor([1.0, 3.0], dtype=torch.float64)
    assert term(DistilTable(mode="full"), new, rows, given).item() == pytest.approx((2.0 + 3.0 * np.exp(-1.0)) / 2)
