"""An adapter on quantised matrices: trainer and sampler compute with the same numbers, and PEFT with them too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from retrain.api import ConfigError
from retrain_local.checks import quantize_problems
from retrain_local.memory import sizes
from retrain_local.model.qlora import KINDS
from tests.kit.local_backend import Local
from tests.kit.local_pairs import check_peft_agrees, relative, shake
from tests.kit.problems import codes_in
from tests.kit.random_models import random_model

LARGEST_GAP = {"nf4": 0.15, "int8": 0.01}  # of the norm of a matrix


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "nf4":
        pytest.importorskip("bitsandbytes")
    return str(request.param)


@pytest.mark.parametrize("merge_limit", [sizes.MERGE_LIMIT, 0])
def test_gradients_are_those_of_peft_on_the_rounded_model(
    kind: str, merge_limit: int, local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its sampler agrees, with a copy of what it expands (small models), and without."""
    monkeypatch.setattr(sizes, "MERGE_LIMIT", merge_limit)
    model = random_model("qwen3 with windows and biases")
    model.save_pretrained(tmp_path / "model")
    pair = local.pair(tmp_path / "model", quantize=kind)
    shake(pair)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            rounded = KINDS[kind](module.weight.detach()).expanded(torch.float32)
            assert 0.0 < relative(rounded, module.weight.detach()) < LARGEST_GAP[kind]
            module.weight.data.copy_(rounded)
    check_peft_agrees(pair, model, tmp_path / "adapter")


def test_the_ratio_is_1_after_a_step(kind: str, local: Local) -> None:
    backend = local.make(quantize=kind)
    plain = local.make()
    backend.train(local.roll(backend))
    backend.publish()
    rows = local.roll(backend, step=1).rows
    for row, found_T in zip(rows, backend.logprobs(rows, 1.0), strict=True):
        assert np.abs(found_T - row.logprobs_T)[row.action_T].max() < 1e-4
    others = plain.reference_logprobs(rows, 1.0)
    gaps = [np.abs(a - b).max() for a, b in zip(backend.reference_logprobs(rows, 1.0), others, strict=True)]
    assert max(gaps) > 1e-3  # it is another model


def test_it_is_refused_where_it_cannot_be(local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrain_local.checks.find_spec", lambda name: None)
    inference = {"engine": "vllm"}
    found = quantize_problems(local.context(rank=0, quantize="nf4", inference=inference).config)
    codes = ["model.needs-bitsandbytes", "model.quantised-training", "engine.not-quantised"]
    assert [problem.code for problem in found] == codes
    assert quantize_problems(local.context(rank=0, inference=inference).config) == []
    computed = local.context(quantize="nf4").config
    assert len(quantize_problems(computed)) == 1
    assert quantize_problems(computed, will_run=False) == [], "retrain capacity only computes"
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        local.pair(tmp_path, quantize="int8")
    assert codes_in(caught) == ["model.not-quantisable"]
