"""Architectures that transformers computes: exactly, or not at all."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from torch import Tensor

from retrain.api import ConfigError, SampleRequest, TrainBatch
from retrain_local.backend import LocalBackend
from retrain_local.decoder import Decoder
from retrain_local.memory import sizes
from retrain_local.model.checkpoint import save_adapter
from retrain_local.model.hf_model import HfDecoder
from retrain_local.model.pair import Pair
from tests.kit.hf_models import COMMON, LIKE_GPT2, LIKE_LLAMA, SERVED, hf_model
from tests.kit.shared import first_or_long

MakePair = Callable[..., Pair]
Shaken = Callable[[Pair], None]
LogitsOf = Callable[[Decoder, Tensor], Tensor]
OwnLogits = Callable[[Any, Tensor], Tensor]


@pytest.fixture(params=sorted(SERVED))
def named(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    model = hf_model(request.param, SERVED[request.param])
    model.save_pretrained(tmp_path)
    return model, tmp_path


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).float().norm() / expected.float().norm())


@pytest.mark.parametrize("merge_limit", first_or_long([sizes.MERGE_LIMIT, 0]))
def test_both_decoders_compute_what_peft_computes(
    named: tuple[Any, Path],
    merge_limit: int,
    make_pair: MakePair,
    logits_of: LogitsOf,
    own_logits: OwnLogits,
    shaken: Shaken,
    ids_N: Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sizes, "MERGE_LIMIT", merge_limit)
    model, folder = named
    pair = make_pair(folder)
    assert isinstance(pair.trained, HfDecoder)
    with torch.no_grad():
        assert relative(logits_of(pair.sampler, ids_N), own_logits(model, ids_N)) < 1e-5
        base = logits_of(pair.trained, ids_N)
    shaken(pair)
    with torch.no_grad(), pair.trained.as_reference():
        assert torch.equal(logits_of(pair.trained, ids_N), base)
    with torch.no_grad():
        started = logits_of(pair.trained, ids_N)
        pair.trained.keep_reference()
        for p in pair.parameters.values():
            p.mul_(1.5)
        with pair.trained.as_reference():
            assert torch.equal(logits_of(pair.trained, ids_N), started)
        assert not torch.equal(logits_of(pair.trained, ids_N), started)
    pair.publish()
    pair.publish()
    (tmp_path / "adapter").mkdir()
    save_adapter(pair, tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = PeftModel.from_pretrained(model, str(tmp_path / "adapter"), is_trainable=True).eval()
    theirs = {name: p for name, p in peft.named_parameters() if p.requires_grad}
    assert theirs.keys() == pair.parameters.keys()
    expected = own_logits(peft, ids_N)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad((expected * weights).sum(), list(theirs.values()))
    with torch.no_grad():
        assert relative(logits_of(pair.sampler, ids_N), expected) < 1e-5
    for recompute in (False, True, False):
        pair.trained.recompute = recompute
        found = logits_of(pair.trained, ids_N)
        assert relative(found.detach(), expected.detach()) < 1e-5
        gradients = torch.autograd.grad((found * weights).sum(), list(pair.parameters.values()))
        for name, mine, other in zip(theirs, gradients, wanted, strict=True):
            assert relative(mine, other) < 1e-4, name


def test_a_sampler_in_another_dtype(
    named: tuple[Any, Path], make_pair: MakePair, logits_of: LogitsOf, ids_N: Tensor
) -> None:
    pair = make_pair(named[1], sampler_dtype=torch.bfloat16, sampler_devices=[torch.device("cpu")] * 2)
    assert (pair.trained.dtype, pair.sampler.dtype) == (torch.float32, torch.bfloat16)
    with torch.no_grad():
        exact, rounded = logits_of(pair.trained, ids_N), logits_of(pair.sampler, ids_N)
        assert torch.equal(logits_of(pair.samplers[1], ids_N), rounded)
    assert relative(rounded, exact) < 0.1


def test_the_shape_is_measured(make_pair: MakePair, tmp_path: Path) -> None:
    hf_model("DeepseekV3", SERVED["DeepseekV3"]).save_pretrained(tmp_path)
    shape = make_pair(tmp_path).trained.shape
    assert (shape.layers, shape.heads, shape.kv_heads) == (3, 4, 4)
    assert (shape.head_size, shape.value_size, shape.hidden, shape.inner) == (16, 12, 48, 80)
    assert (shape.vocabulary, shape.context) == (200, 64)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Bloom": (COMMON | {"hidden_size": 48, "n_layer": 2, "n_head": 4}, "BloomForCausalLM"),
    "GPTJ": (LIKE_GPT2 | {"rotary_dim": 8, "n_positions": 64}, "GPTJForCausalLM"),
    "Llama4": (LIKE_LLAMA | {"head_dim": 16, "intermediate_size_mlp": 80, "num_local_experts": 2}, "chunked_attention"),
    "Lfm2": (LIKE_LLAMA | {"full_attn_idxs": [1]}, "conv layers"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_computed_exactly_is_refused(kind: str, make_pair: MakePair, tmp_path: Path) -> None:
    sizes, said = REFUSED[kind]
    config = getattr(transformers, "Llama4TextConfig" if kind == "Llama4" else f"{kind}Config")(**sizes)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=said) as caught:
        make_pair(tmp_path)
    assert "[model] model" in str(caught.value)


def test_a_body_that_adds_something_of_its_own_is_found_out(
    make_pair: MakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe compares numbers: here the architecture's own attention, which packing replaces, does a little more."""
    from transformers.models.granite import modeling_granite

    plain = modeling_granite.eager_attention_forward

    def stranger(*arguments: Any, **given: Any) -> Any:
        values, weights = plain(*arguments, **given)
        return values * 1.05, weights

    hf_model("Granite", SERVED["Granite"]).save_pretrained(tmp_path)
    monkeypatch.setattr(modeling_granite, "eager_attention_forward", stranger)
    with pytest.raises(ConfigError, match="differ by"):
        make_pair(tmp_path)


@pytest.mark.parametrize("kind", first_or_long(["Gemma2", "GPT2", "GptOss"]))
def test_a_whole_step(
    kind: str, make_backend: Callable[..., LocalBackend], roll: Callable[..., TrainBatch], tmp_path: Path
) -> None:
    hf_model(kind, SERVED[kind]).save_pretrained(tmp_path)
    backend = make_backend(tmp_path)
    requests = [SampleRequest(prompt_T=torch.arange(5, 5 + n).numpy(), seeds_G=(1, 2, 3)) for n in (3, 9)]
    for step in range(2):
        report = backend.train(roll(backend, requests, step=step))
        backend.publish()
        assert report.ratio_max == pytest.approx(1.0, abs=1e-4)
        assert report.grad_norm
