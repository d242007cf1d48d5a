"""Architectures that transformers computes: exactly, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from retrain.api import ConfigError
from retrain_local.model import projection
from retrain_local.model.checkpoint import save_adapter
from retrain_local.model.hf_model import HfDecoder, HfFullDecoder
from retrain_local.training.head import selected_logprobs
from tests.kit.hf_models import SERVED, hf_model
from tests.kit.local_backend import Local
from tests.kit.local_pairs import IDS_N, check_peft_agrees, hidden_of, logits_of, own_logits, relative, shake
from tests.kit.problems import codes_in


@pytest.fixture(params=sorted(SERVED))
def named(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    model = hf_model(request.param, SERVED[request.param])
    model.save_pretrained(tmp_path)
    return model, tmp_path


@pytest.mark.usefixtures("merge_limit")
def test_both_decoders_compute_what_peft_computes(named: tuple[Any, Path], local: Local, tmp_path: Path) -> None:
    model, folder = named
    pair = local.pair(folder)
    assert isinstance(pair.trained, HfDecoder)
    with torch.no_grad():
        assert relative(logits_of(pair.sampler), own_logits(model)) < 1e-5
        base = logits_of(pair.trained)
    shake(pair)
    with torch.no_grad(), pair.trained.as_reference():
        assert torch.equal(logits_of(pair.trained), base)
    with torch.no_grad():
        started = logits_of(pair.trained)
        pair.trained.keep_reference()
        for p in pair.parameters.values():
            p.mul_(1.5)
        with pair.trained.as_reference():
            assert torch.equal(logits_of(pair.trained), started)
        assert not torch.equal(logits_of(pair.trained), started)
    check_peft_agrees(pair, model, tmp_path / "adapter")


def test_prepacked_matrices_change_no_logit(
    named: tuple[Any, Path], local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = local.pair(named[1])
    shake(plain)
    plain.publish()
    monkeypatch.setattr(projection, "PREPACK_FROM", 1)
    packed = local.pair(named[1])
    with torch.inference_mode():
        assert relative(logits_of(packed.sampler), logits_of(plain.sampler)) > 1e-3
        packed.publish(plain.adapter)
        assert relative(logits_of(packed.sampler), logits_of(plain.sampler)) < 1e-5


def test_a_sampler_in_another_dtype(named: tuple[Any, Path], local: Local) -> None:
    pair = local.pair(named[1], sampler_dtype=torch.bfloat16, sampler_devices=[torch.device("cpu")] * 2)
    assert (pair.trained.dtype, pair.sampler.dtype) == (torch.float32, torch.bfloat16)
    with torch.no_grad():
        exact, rounded = logits_of(pair.trained), logits_of(pair.sampler)
        assert torch.equal(logits_of(pair.samplers[1]), rounded)
    assert relative(rounded, exact) < 0.1


def test_the_shape_is_measured(local: Local, tmp_path: Path) -> None:
    hf_model("DeepseekV3", SERVED["DeepseekV3"]).save_pretrained(tmp_path)
    shape = local.pair(tmp_path).trained.shape
    assert (shape.layers, shape.heads, shape.kv_heads) == (3, 4, 4)
    assert (shape.head_size, shape.value_size, shape.hidden, shape.inner) == (16, 12, 48, 80)
    assert (shape.vocabulary, shape.context) == (200, 64)


KINDS = ["GPT2", "GptOss", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("Gemma2", "Granite", "OPT"))]


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_trained_published_and_saved(kind: str, local: Local, tmp_path: Path) -> None:
    """The gradient is that of transformers, by the head that makes its logits again; the file is its model."""
    if kind not in SERVED:
        pytest.skip("another version of transformers")
    model = hf_model(kind, SERVED[kind])
    model.save_pretrained(tmp_path / "model")
    pair = local.pair(tmp_path / "model", rank=0)
    assert isinstance(pair.trained, HfFullDecoder)
    theirs = dict(model.named_parameters())
    assert theirs.keys() == pair.parameters.keys()
    weights_T = torch.randn(16, generator=torch.Generator().manual_seed(1))
    alone_T = IDS_N[-17:]
    logits = model(input_ids=alone_T[None], use_cache=False).logits[0, :-1]
    expected_T = logits.log_softmax(-1).gather(1, alone_T[1:, None])[:, 0]
    wanted = torch.autograd.grad((expected_T * weights_T).sum(), list(theirs.values()))
    for recompute in (False, True, False):
        pair.trained.recompute = recompute
        given = pair.trained.logits, 2**22 // 5  # five rows of logits at a time
        hidden_TD = hidden_of(pair.trained)[-17:-1]
        found_T = selected_logprobs(hidden_TD, alone_T[1:], *given, 1.0, parameters=pair.trained.head_parameters)
        assert relative(found_T.detach(), expected_T.detach()) < 1e-5
        found = torch.autograd.grad((found_T * weights_T).sum(), list(pair.parameters.values()))
        for name, mine, other in zip(theirs, found, wanted, strict=True):
            # OPT's keys have biases that change nothing
            assert (mine - other).norm() < 1e-4 * other.norm() + 1e-6, name
    with torch.no_grad():
        before = logits_of(pair.trained)
        for p in pair.parameters.values():
            p.mul_(1.1)
        assert relative(logits_of(pair.sampler), before) < 1e-5
        pair.publish()
        after = logits_of(pair.trained)
        assert relative(after, before) > 1e-2
        assert relative(logits_of(pair.sampler), after) < 1e-5
        with pair.trained.as_reference():
            assert torch.equal(logits_of(pair.trained), before)
        assert torch.equal(logits_of(pair.trained), after)
        (tmp_path / "saved").mkdir()
        save_adapter(pair, tmp_path / "saved")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager")
        assert relative(own_logits(again), after) < 1e-5


def test_what_would_not_be_trained_is_refused(local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrain_local.model.load.bf16_refusal", lambda: None)
    hf_model("GPT2", SERVED["GPT2"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        local.pair(tmp_path, rank=0, dtype="bf16")
    assert codes_in(caught) == ["model.fp32-only"]
