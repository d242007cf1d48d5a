"""An adapter on quantised matrices: trainer and sampler compute with the same numbers, and PEFT with them too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor

from retrain.api import ConfigError, SampleRequest, TrainBatch
from retrain_local.backend import LocalBackend
from retrain_local.checks import quantize_problems
from retrain_local.memory import sizes
from retrain_local.model.checkpoint import save_adapter
from retrain_local.model.pair import Pair
from retrain_local.model.qlora import KINDS
from tests.kit.random_models import random_model

MakePair = Callable[..., Pair]
LARGEST_GAP = {"nf4": 0.15, "int8": 0.01}  # of the norm of a matrix


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "nf4":
        pytest.importorskip("bitsandbytes")
    return str(request.param)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).float().norm() / expected.float().norm())


@pytest.mark.parametrize("merge_limit", [sizes.MERGE_LIMIT, 0])
def test_gradients_are_those_of_peft_on_the_rounded_model(
    kind: str,
    merge_limit: int,
    make_pair: MakePair,
    agrees_with: Callable[..., None],
    shaken: Callable[[Pair], None],
    ids_N: Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And its sampler agrees, with a copy of what it expands (small models), and without."""
    monkeypatch.setattr(sizes, "MERGE_LIMIT", merge_limit)
    model = random_model("qwen3 with windows and biases")
    model.save_pretrained(tmp_path / "model")
    pair = make_pair(tmp_path / "model", quantize=kind)
    shaken(pair)
    pair.publish()
    (tmp_path / "adapter").mkdir()
    save_adapter(pair, tmp_path / "adapter")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            rounded = KINDS[kind](module.weight.detach()).expanded(torch.float32)
            assert 0.0 < relative(rounded, module.weight.detach()) < LARGEST_GAP[kind]
            module.weight.data.copy_(rounded)
    peft = PeftModel.from_pretrained(model, str(tmp_path / "adapter"), is_trainable=True).eval()
    theirs = {name: p for name, p in peft.named_parameters() if p.requires_grad}
    agrees_with(peft, theirs, pair, ids_N)


def test_the_ratio_is_1_after_a_step(
    kind: str,
    make_backend: Callable[..., LocalBackend],
    requests: Sequence[SampleRequest],
    roll: Callable[..., TrainBatch],
) -> None:
    backend = make_backend(quantize=kind)
    plain = make_backend()
    backend.train(roll(backend, requests))
    backend.publish()
    rows = roll(backend, requests, step=1).rows
    for row, found_T in zip(rows, backend.logprobs(rows, 1.0), strict=True):
        assert np.abs(found_T - row.logprobs_T)[row.action_T].max() < 1e-4
    others = plain.reference_logprobs(rows, 1.0)
    gaps = [np.abs(a - b).max() for a, b in zip(backend.reference_logprobs(rows, 1.0), others, strict=True)]
    assert max(gaps) > 1e-3  # it is another model


def test_it_is_refused_where_it_cannot_be(
    make_context: Callable[..., Any], make_pair: MakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain_local.checks.find_spec", lambda name: None)
    inference = {"engine": "vllm"}
    found = quantize_problems(make_context(rank=0, quantize="nf4", inference=inference).config)
    assert [problem.where for problem in found] == [
        f"[{where} (default)" for where in ("model] quantize", "model] quantize", "inference] engine")
    ]
    assert found[0].fix == 'pip install "retrain-local[quantize]", or use "int8"'
    assert quantize_problems(make_context(rank=0, inference=inference).config) == []
    computed = make_context(quantize="nf4").config
    assert len(quantize_problems(computed)) == 1
    assert quantize_problems(computed, will_run=False) == [], "retrain capacity only computes"
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="quantize = 'int8' is not served for gpt2"):
        make_pair(tmp_path, quantize="int8")
