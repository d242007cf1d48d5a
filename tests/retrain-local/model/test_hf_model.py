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
from torch import Tensor, nn

from retrain.api import ConfigError, SampleRequest, TrainBatch
from retrain_local.backend import LocalBackend
from retrain_local.decoder import Decoder
from retrain_local.model import projection
from retrain_local.model.checkpoint import save_adapter
from retrain_local.model.hf_model import HfDecoder
from retrain_local.model.pair import Pair

MakePair = Callable[..., Pair]
Shaken = Callable[[Pair], None]
LogitsOf = Callable[[Decoder, Tensor], Tensor]
OwnLogits = Callable[[Any, Tensor], Tensor]
COMMON: dict[str, Any] = {"vocab_size": 200, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LIKE_LLAMA: dict[str, Any] = COMMON | {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
LIKE_GPT2: dict[str, Any] = COMMON | {"n_embd": 48, "n_layer": 2, "n_head": 4, "initializer_range": 0.1}
OPT: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "init_std": 0.1}
SERVED: dict[str, dict[str, Any]] = {
    "Gemma2": LIKE_LLAMA  # scores and logits soft-capped, windows on every other layer
    | {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "GPT2": LIKE_GPT2 | {"n_positions": 64},  # Conv1D, learned positions
    "GptOss": LIKE_LLAMA | {"head_dim": 16, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "OPT": COMMON | OPT | {"hidden_size": 48, "ffn_dim": 80, "word_embed_proj_dim": 48, "max_position_embeddings": 64},
    "Granite": LIKE_LLAMA | {"logits_scaling": 3.0, "residual_multiplier": 0.5},
    "DeepseekV3": LIKE_LLAMA  # values narrower than keys
    | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    | {"v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    | {"n_shared_experts": 1, "moe_intermediate_size": 32},
    "Llama": LIKE_LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
}
if transformers.__version__ < "5":
    del SERVED["OPT"]  # builds masks of its own there, and is refused
HEADS = {"GPT2": "GPT2LMHeadModel"}


def random_model(kind: str, sizes: dict[str, Any]) -> Any:
    config, model = getattr(transformers, f"{kind}Config"), HEADS.get(kind, f"{kind}ForCausalLM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = getattr(transformers, model)(config(**sizes)).eval()
        for name, p in made.named_parameters():
            if name.endswith("sinks"):
                nn.init.normal_(p)
    made.set_attn_implementation("eager")
    return made


@pytest.fixture(params=sorted(SERVED))
def named(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    model = random_model(request.param, SERVED[request.param])
    model.save_pretrained(tmp_path)
    return model, tmp_path


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).float().norm() / expected.float().norm())


@pytest.mark.parametrize("merge_limit", [projection.MERGE_LIMIT, 0])
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
    monkeypatch.setattr(projection, "MERGE_LIMIT", merge_limit)
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
    random_model("DeepseekV3", SERVED["DeepseekV3"]).save_pretrained(tmp_path)
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

    random_model("Granite", SERVED["Granite"]).save_pretrained(tmp_path)
    monkeypatch.setattr(modeling_granite, "eager_attention_forward", stranger)
    with pytest.raises(ConfigError, match="differ by"):
        make_pair(tmp_path)


def test_torch_compile_is_refused(make_pair: MakePair, tmp_path: Path) -> None:
    random_model("GPT2", SERVED["GPT2"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="GPT2LMHeadModel"):
        make_pair(tmp_path).trained.compile()


@pytest.mark.parametrize("kind", ["Gemma2", "GPT2", "GptOss"])
def test_a_whole_step(
    kind: str, make_backend: Callable[..., LocalBackend], roll: Callable[..., TrainBatch], tmp_path: Path
) -> None:
    random_model(kind, SERVED[kind]).save_pretrained(tmp_path)
    backend = make_backend(tmp_path)
    requests = [SampleRequest(prompt_T=torch.arange(5, 5 + n).numpy(), seeds_G=(1, 2, 3)) for n in (3, 9)]
    for step in range(2):
        report = backend.train(roll(backend, requests, step=step))
        backend.publish()
        assert report.ratio_max == pytest.approx(1.0, abs=1e-4)
        assert report.grad_norm
