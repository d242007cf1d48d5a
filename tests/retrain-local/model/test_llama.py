"""The decoder of the Llama family against transformers and PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from retrain_local.memory import sizes
from retrain_local.model.llama import LlamaDecoder
from tests.kit.local_backend import Local
from tests.kit.local_pairs import IDS_N, check_peft_agrees, logits_of, own_logits, relative, shake
from tests.kit.random_models import MODELS, random_model


@pytest.fixture(params=sorted(MODELS))
def named(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    model = random_model(request.param)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def test_in_bf16(named: tuple[Any, Path], local: Local) -> None:
    model, folder = named
    sampler = local.pair(folder, sampler_dtype=torch.bfloat16).sampler
    assert sampler.dtype == torch.bfloat16
    with torch.no_grad():
        exact, own = own_logits(model), own_logits(model.bfloat16(), IDS_N)
        found = logits_of(sampler)
    assert found.dtype == torch.bfloat16
    assert relative(found, exact) < max(2e-2, 1.5 * relative(own, exact))  # as close to fp32 as transformers' own


@pytest.mark.parametrize("merge_limit", [sizes.MERGE_LIMIT, 0])
def test_logits_and_gradients_are_those_of_peft_and_only_publishing_changes_the_sampler(
    named: tuple[Any, Path], merge_limit: int, local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "MERGE_LIMIT", merge_limit)
    model, folder = named
    pair = local.pair(folder)
    assert isinstance(pair.trained, LlamaDecoder)
    with torch.no_grad():
        before = logits_of(pair.sampler)
        assert relative(before, own_logits(model)) < 1e-5
        shake(pair)
        assert torch.equal(logits_of(pair.sampler), before)
    check_peft_agrees(pair, model, tmp_path / "adapter")
    with torch.no_grad():
        assert relative(logits_of(pair.sampler), before) > 1e-2


def test_a_token_at_a_time_is_the_row_at_once(named: tuple[Any, Path], local: Local) -> None:
    """Positions come from the caller alone, and one token of many rows is as good a packed row as any."""
    model, folder = named
    sampler = local.pair(folder).sampler
    kept: dict[int, list[Tensor]] = {}

    def attend(layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor, scores: Any) -> Tensor:
        kept.setdefault(layer, []).append(torch.stack([keys_NKD, values_NKD]))
        keys, values = torch.cat(kept[layer], dim=1).unbind(0)
        if scores.window is not None:
            keys, values = keys[-scores.window :], values[-scores.window :]
        repeats = queries_NHD.shape[1] // keys.shape[1]
        weights = torch.einsum("nhd,mhd->hnm", queries_NHD, keys.repeat_interleave(repeats, 1)) * scores.scale
        return torch.einsum("hnm,mhd->nhd", weights.softmax(-1), values.repeat_interleave(repeats, 1))

    row = IDS_N[-17:]
    with torch.no_grad():
        steps = [sampler.logits(sampler.hidden(row[at : at + 1], torch.tensor([at]), attend)) for at in range(len(row))]
        assert relative(torch.cat(steps), model(input_ids=row[None]).logits[0]) < 1e-5
