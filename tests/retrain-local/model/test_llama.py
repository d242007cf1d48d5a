"""The decoder of the Llama family against transformers and PEFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from retrain_local.decoder import Decoder
from retrain_local.memory import sizes
from retrain_local.model.checkpoint import save_adapter
from retrain_local.model.llama import LlamaDecoder
from retrain_local.model.pair import Pair
from tests.kit.random_models import MODELS, random_model

MakePair = Callable[..., Pair]
LogitsOf = Callable[[Decoder, Tensor], Tensor]
OwnLogits = Callable[[Any, Tensor], Tensor]


@pytest.fixture(params=sorted(MODELS))
def named(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    model = random_model(request.param)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).float().norm() / expected.float().norm())


def test_it_computes_what_transformers_computes(
    named: tuple[Any, Path], make_pair: MakePair, logits_of: LogitsOf, own_logits: OwnLogits, ids_N: Tensor
) -> None:
    model, folder = named
    pair = make_pair(folder)
    with torch.no_grad():
        for decoder in (pair.sampler, pair.trained):
            assert isinstance(decoder, LlamaDecoder)
            assert relative(logits_of(decoder, ids_N), own_logits(model, ids_N)) < 1e-5


def test_its_hidden_states_are_those_that_the_head_of_transformers_reads(
    named: tuple[Any, Path], make_pair: MakePair, hidden_of: LogitsOf, ids_N: Tensor
) -> None:
    model, folder = named
    with torch.no_grad():
        found_ND = hidden_of(make_pair(folder).sampler, ids_N)[-17:]
        expected_ND = model.model(input_ids=ids_N[-17:][None]).last_hidden_state[0]
    assert relative(found_ND, expected_ND) < 1e-5


def test_in_bf16(
    named: tuple[Any, Path], make_pair: MakePair, logits_of: LogitsOf, own_logits: OwnLogits, ids_N: Tensor
) -> None:
    model, folder = named
    sampler = make_pair(folder, sampler_dtype=torch.bfloat16).sampler
    assert sampler.dtype == torch.bfloat16
    with torch.no_grad():
        exact, own = own_logits(model, ids_N), own_logits(model.bfloat16(), ids_N)
        found = logits_of(sampler, ids_N)
    assert found.dtype == torch.bfloat16
    assert relative(found, exact) < max(2e-2, 1.5 * relative(own, exact))  # as close to fp32 as transformers' own


@pytest.mark.parametrize("merge_limit", [sizes.MERGE_LIMIT, 0])
def test_gradients_are_those_of_peft(
    named: tuple[Any, Path],
    merge_limit: int,
    make_pair: MakePair,
    logits_of: LogitsOf,
    own_logits: OwnLogits,
    shaken: Callable[[Pair], None],
    ids_N: Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sizes, "MERGE_LIMIT", merge_limit)
    model, folder = named
    pair = make_pair(folder)
    shaken(pair)
    (tmp_path / "adapter").mkdir()
    save_adapter(pair, tmp_path / "adapter")
    peft = PeftModel.from_pretrained(model, str(tmp_path / "adapter"), is_trainable=True).eval()
    theirs = {name: p for name, p in peft.named_parameters() if p.requires_grad}
    assert theirs.keys() == pair.parameters.keys()
    weights = torch.randn(len(ids_N), 200, generator=torch.Generator().manual_seed(1))
    expected = own_logits(peft, ids_N)
    wanted = torch.autograd.grad((expected * weights).sum(), list(theirs.values()))
    for recompute in (False, True):
        pair.trained.recompute = recompute
        found = logits_of(pair.trained, ids_N)
        assert relative(found.detach(), expected.detach()) < 1e-5
        gradients = torch.autograd.grad((found * weights).sum(), list(pair.parameters.values()))
        by_name = dict(zip(pair.parameters, gradients, strict=True))
        for name, gradient in zip(theirs, wanted, strict=True):
            assert relative(by_name[name], gradient) < 1e-4, name


@pytest.mark.parametrize("merge_limit", [sizes.MERGE_LIMIT, 0])
def test_what_is_published_is_what_was_trained(
    named: tuple[Any, Path],
    merge_limit: int,
    make_pair: MakePair,
    logits_of: LogitsOf,
    shaken: Callable[[Pair], None],
    ids_N: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sizes, "MERGE_LIMIT", merge_limit)
    pair = make_pair(named[1])
    with torch.no_grad():
        before = logits_of(pair.sampler, ids_N)
        shaken(pair)
        assert torch.equal(logits_of(pair.sampler, ids_N), before)
        pair.publish()
        assert relative(logits_of(pair.sampler, ids_N), before) > 1e-2
        assert relative(logits_of(pair.sampler, ids_N), logits_of(pair.trained, ids_N)) < 1e-6


def test_a_token_at_a_time_is_the_row_at_once(
    named: tuple[Any, Path], make_pair: MakePair, own_logits: OwnLogits, ids_N: Tensor
) -> None:
    """Positions come from the caller alone, and one token of many rows is as good a packed row as any."""
    model, folder = named
    sampler = make_pair(folder).sampler
    kept: dict[int, list[Tensor]] = {}

    def attend(layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor, scores: Any) -> Tensor:
        kept.setdefault(layer, []).append(torch.stack([keys_NKD, values_NKD]))
        keys, values = torch.cat(kept[layer], dim=1).unbind(0)
        if scores.window is not None:
            keys, values = keys[-scores.window :], values[-scores.window :]
        repeats = queries_NHD.shape[1] // keys.shape[1]
        weights = torch.einsum("nhd,mhd->hnm", queries_NHD, keys.repeat_interleave(repeats, 1)) * scores.scale
        return torch.einsum("hnm,mhd->nhd", weights.softmax(-1), values.repeat_interleave(repeats, 1))

    row = ids_N[-17:]
    with torch.no_grad():
        steps = [sampler.logits(sampler.hidden(row[at : at + 1], torch.tensor([at]), attend)) for at in range(len(row))]
        assert relative(torch.cat(steps), model(input_ids=row[None]).logits[0]) < 1e-5
