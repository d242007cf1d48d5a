"""Types whose layers keep other state than keys and values, or have attention of their own: the same numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from transformers import AutoModelForCausalLM

from retrain.api import ConfigError, SampleRequest, SamplingParams
from retrain_local.attention.packed import PaddedAttend, Spans
from retrain_local.model.probe import choose_route
from tests.kit.causal_types import COMPOSITES, small_composite, small_model
from tests.kit.local_backend import REQUESTS, Local, check_same_rows, saved
from tests.kit.plain_path import distance, gradient, joined, own_gap, own_logprobs, plain_gradient, plain_model
from tests.kit.problems import codes_in
from tests.kit.shared import first_or_long

TIERS = {
    "qwen3_5_text": "paged",  # gated delta rule
    "lfm2": "paged",  # convolutions
    "falcon_h1": "paged",  # Mamba-2 beside attention in one layer
    "jamba": "paged",  # Mamba, whose module cannot read several tokens from a state
    "nemotron_h": "paged",  # layers of one part each
    "kimi_linear": "paged",  # delta attention and latent attention
    "llama4_text": "paged",  # chunks
    "gemma4_text": "paged",  # heads of different sizes, shared keys and values
    "gptj": "paged",  # attention that it writes out itself
    "bloom": "paged",  # with a slope by position
    "bart": "paged",  # positions counted from the length of the cache
    "roberta": "paged",  # positions that begin behind the padding id
    "hrm_text": "paged",  # layers that are called several times
    "minimax": "paged",  # a cache class of its own
    "rwkv": "paged",  # a list of states, continued one row at a time
    "xlstm": "paged",  # states of all layers in one object
    "laguna": "paged",  # shared experts that PEFT renames when it loads an adapter
    "inkling_text": "plain",  # a bias from its queries, and a window that looks like a state of constant size
    "zaya": "paged",  # a convolution of queries, keys and values at once
    "doge": "plain",  # a mask from its values
    "openai-gpt": "plain",  # no cache
    "recurrent_gemma": "plain",  # a state that its modules keep from one forward pass to the next
}
QUICK = ("qwen3_5_text", "gptj", "doge")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            model = small_composite(kind) if kind in COMPOSITES else small_model(kind)
            model.save_pretrained(made[kind])
        return made[kind]

    return folder


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in TIERS])
def test_sampling_training_and_resuming_are_transformers(
    kind: str, local: Local, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    backend = local.make(folders(kind))
    assert backend._pair.trained.tier == TIERS[kind]
    backend.train(local.roll(backend, requests=REQUESTS, max_tokens=12))
    backend.publish()
    batch = local.roll(backend, requests=REQUESTS, max_tokens=12, step=1)
    model = plain_model(folders(kind), saved(tmp_path / "adapter", backend.save_adapter)).eval()
    assert own_gap(model, batch) < 1e-4
    wanted = joined(plain_gradient(batch, model))
    for most in (0, 20):  # one pack, and packs of about a row
        assert distance(gradient(backend, batch, max_tokens=most), wanted) < 1e-4
    state = saved(tmp_path / "state", backend.save)
    resumed = local.make(folders(kind))
    resumed.load(state)
    check_same_rows(*(local.roll(each, requests=REQUESTS, max_tokens=12, step=2) for each in (resumed, backend)))


@pytest.mark.parametrize("kind", first_or_long(["nemotron_h", "deepseek_v3", "gemma4_text", "openai-gpt"]))
def test_all_weights_are_trained_and_what_no_gradient_trains_is_kept(
    kind: str, local: Local, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    backend = local.make(folders(kind), rank=0)
    backend.train(local.roll(backend, requests=REQUESTS, max_tokens=8))
    backend.publish()
    batch = local.roll(backend, requests=REQUESTS, max_tokens=8, step=1)
    model, report = AutoModelForCausalLM.from_pretrained(
        saved(tmp_path / "model", backend.save_adapter), output_loading_info=True
    )
    assert not report["missing_keys"]
    assert own_gap(model.eval(), batch) < 1e-4
    resumed = local.make(folders(kind), rank=0)
    resumed.load(saved(tmp_path / "state", backend.save))
    check_same_rows(*(local.roll(each, requests=REQUESTS, max_tokens=8, step=2) for each in (resumed, backend)))


@pytest.mark.parametrize("rank", [4, 0])
def test_weights_that_inference_divides_are_saved_whole(rank: int, local: Local, tmp_path: Path) -> None:
    small_model("rwkv", num_hidden_layers=5, rescale_every=2).save_pretrained(tmp_path / "model")
    backend = local.make(tmp_path / "model", rank=rank)
    backend.train(local.roll(backend, requests=REQUESTS, max_tokens=8))
    backend.publish()
    batch = local.roll(backend, requests=REQUESTS, max_tokens=8, step=1)
    written = saved(tmp_path / "written", backend.save_adapter)
    if not rank:
        assert own_gap(AutoModelForCausalLM.from_pretrained(written).eval(), batch) < 1e-4
        return
    model = plain_model(tmp_path / "model", written).eval()
    assert own_gap(model, batch) < 1e-4
    before = plain_model(tmp_path / "model", written)
    before.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert own_gap(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval(), batch) < 1e-4


@pytest.mark.parametrize("kind", first_or_long(list(COMPOSITES)))
@pytest.mark.parametrize("rank", [4, 0])
def test_the_text_of_a_larger_checkpoint_fits_the_whole(
    kind: str, rank: int, local: Local, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = small_composite(kind)
    backend = local.make(folders(kind), rank=rank)
    model = backend._pair.trained._model
    loaded = sum(p.numel() for name, p in model.named_parameters() if "lora_" not in name)
    assert loaded <= sum(p.numel() for name, p in whole.named_parameters() if "vision" not in name)
    backend.train(local.roll(backend, requests=REQUESTS, max_tokens=8))
    backend.publish()
    batch = local.roll(backend, requests=REQUESTS, max_tokens=8, step=1)
    written = saved(tmp_path / "written", backend.save_adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT warns about names that do not fit
        warnings.filterwarnings("ignore", category=FutureWarning)
        if rank:
            model = PeftModel.from_pretrained(type(whole).from_pretrained(folders(kind)), str(written))
            assert not any("vision" in name for name, _ in model.named_parameters() if "lora_" in name)
        else:
            model, report = type(whole).from_pretrained(written, output_loading_info=True)
            assert not report["missing_keys"]
            assert not report["unexpected_keys"]
    assert own_gap(model.eval(), batch) < 1e-4


PROMPT_T = np.arange(2, 9)


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    kind=st.sampled_from(["qwen3_5_text", "falcon_h1", "bloom", "doge"]),
    is_shared=st.booleans(),
)
def test_a_row_does_not_depend_on_its_neighbours(
    lengths: list[int], kind: str, is_shared: bool, pairs: Callable[[str], Any]
) -> None:
    """Hidden states and gradients of each row of a pack, after a shared prompt or alone, are those of the row alone."""
    decoder = pairs(kind).trained
    make, cpu = decoder.packed(PaddedAttend), torch.device("cpu")
    rng = np.random.default_rng(len(lengths))
    rows = [rng.integers(3, 190, size=length) for length in lengths]
    before = [PROMPT_T] if is_shared else []
    spans = Spans(
        lengths=tuple(len(part) for part in (*before, *rows)),
        prefixes=(*([-1] * len(before)), *([0 if is_shared else -1] * len(rows))),
    )

    def of(spans: Spans, ids: np.ndarray) -> torch.Tensor:
        return decoder.hidden(torch.from_numpy(ids), torch.from_numpy(spans.positions()), make(spans, cpu))

    parameters = [p for name, p in pairs(kind).parameters.items() if "lora_B" in name]
    packed = of(spans, np.concatenate([*before, *rows])).split(spans.lengths)[len(before) :]
    for row_T, found in zip(rows, packed, strict=True):
        whole_T = np.concatenate([*before, row_T])
        alone = of(Spans.apart([len(whole_T)]), whole_T)[-len(row_T) :]
        assert torch.allclose(found, alone, atol=1e-4)
        gradients = (
            torch.autograd.grad(part.square().sum(), parameters, retain_graph=True, allow_unused=True)
            for part in (found, alone)
        )
        for left, right in zip(*gradients, strict=True):
            assert (left is None) == (right is None)
            # Gradients of a row of one token reach 13; rounding moves their small entries by 4e-5 of the largest.
            assert left is None or (left - right).abs().max() <= 1e-4 + 1e-3 * right.abs().max()


@pytest.fixture(scope="module")
def pairs(local: Local, folders: Callable[[str], Path]) -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def pair(kind: str) -> Any:
        if kind not in made:
            made[kind] = local.pair(folders(kind))
        return made[kind]

    return pair


@pytest.mark.parametrize("kind", ["qwen3_5_text", "bloom", "doge"])
def test_turns_continue_from_what_was_kept(kind: str, local: Local, folders: Callable[[str], Path]) -> None:
    from retrain.kernel.config.plugin_tables import EnvironmentTable

    context = local.context(folders(kind), tables={"environment": EnvironmentTable(provider="any")})
    from retrain_local.factory import create_backend

    backend: Any = create_backend(context)
    engine, params = backend._engine, SamplingParams(max_tokens=6, temperature=1.0)
    [first] = backend.sample(REQUESTS[1:2], params)
    engine.metrics()
    rows = [np.concatenate([REQUESTS[1].prompt_T, each.tokens_T, [7, 9]]) for each in first]
    asked = [SampleRequest(prompt_T=row, seeds_G=(3,)) for row in rows]
    found = backend.sample(asked, params)
    assert engine.metrics()["engine_prompt_reuse"] > 0.5
    model = AutoModelForCausalLM.from_pretrained(folders(kind))
    for row, [each] in zip(rows, found, strict=True):
        with torch.no_grad():
            whole_T = own_logprobs(model.eval(), torch.from_numpy(np.concatenate([row, each.tokens_T])))
        wanted = whole_T[-len(each.tokens_T) :].numpy()
        assert each.logprobs_T == pytest.approx(wanted, abs=1e-4)


def test_few_slots_put_rows_aside_and_change_nothing(local: Local, folders: Callable[[str], Path]) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0)
    wide, narrow = local.make(folders("lfm2")), local.make(folders("lfm2"))
    narrow._policies[0].limits.cache_slots = 2
    for left, right in zip(wide.sample(REQUESTS, params), narrow.sample(REQUESTS, params), strict=True):
        for a, b in zip(left, right, strict=True):
            assert a.tokens_T.tolist() == b.tokens_T.tolist()
            assert a.logprobs_T == pytest.approx(b.logprobs_T, abs=1e-5)


def test_a_model_without_attention_is_paged_by_its_states() -> None:
    route = choose_route(small_model("lfm2", layer_types=["conv"] * 4))
    assert not route.why
    assert route.mixers is not None
    assert len(route.mixers.layers) == 4


def test_a_prompt_of_one_token_begins_as_the_model_does(local: Local, tmp_path: Path) -> None:
    model = small_model("zaya", num_hidden_layers=2, attention_bias=True)  # the bias is part of its first state
    model.save_pretrained(tmp_path)
    batch = local.roll(local.make(tmp_path), requests=REQUESTS, max_tokens=8)
    assert min(len(request.prompt_T) for request in REQUESTS) == 1
    assert own_gap(model, batch) < 1e-4


def test_experts_of_any_size_are_trained(local: Local, tmp_path: Path) -> None:
    model = small_model("qwen3_moe", moe_intermediate_size=30)
    model.save_pretrained(tmp_path)
    model.set_experts_implementation("eager")  # torch refuses to group their products
    backend = local.make(tmp_path)
    batch = local.roll(backend, requests=REQUESTS, max_tokens=8)
    assert own_gap(model, batch) < 1e-4
    backend.train(batch)


def test_one_expert_of_one_group_is_no_choice_of_the_group() -> None:
    route = choose_route(small_model("deepseek_v3", num_experts_per_tok=1, n_group=1, topk_group=1))
    assert not route.why
    assert route.routers is not None
    assert route.routers.can_replay


def test_a_model_that_sees_later_tokens_is_refused(local: Local, tmp_path: Path) -> None:
    small_model("roberta", is_decoder=False).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        local.pair(tmp_path)
    assert codes_in(caught) == ["model.not-causal"]


def test_a_model_that_reads_a_row_differently_each_time_is_refused(
    local: Local, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.gptj import modeling_gptj

    plain = modeling_gptj.GPTJMLP.forward
    monkeypatch.setattr(modeling_gptj.GPTJMLP, "forward", lambda self, x: plain(self, x) + torch.rand_like(x))
    with pytest.raises(ConfigError) as caught:
        local.pair(folders("gptj"))
    assert codes_in(caught) == ["model.varying-logits"]


@pytest.mark.parametrize(
    ("kind", "window"), [("phimoe", "sliding_window"), ("gpt_neo", "window_size"), ("mistral", "sliding_window")]
)
def test_a_window_wider_than_the_rows_of_the_probe_is_kept(kind: str, window: str) -> None:
    model = small_model(kind, **{window: 24})
    model.set_attn_implementation("eager")
    ids_N = torch.arange(40) * 7 % 200
    with torch.no_grad():
        wanted = model(input_ids=ids_N[None], use_cache=False).logits[0]
        decoder = choose_route(model).decoder(model)
        attend = PaddedAttend(Spans.apart((40,)), model.device)
        found = decoder.logits(decoder.hidden(ids_N, torch.arange(40), attend))
    assert decoder.tier == "paged"
    assert (found - wanted).abs().max() < 1e-4


def test_positions_behind_the_padding_id_shorten_the_context_and_padding_ends_a_row(
    local: Local, folders: Callable[[str], Path]
) -> None:
    pair, model = local.pair(folders("roberta")), small_model("roberta")
    padding, limit = model.config.pad_token_id, model.config.max_position_embeddings
    length = limit - padding - 1
    assert pair.trained.shape.context == length
    assert padding in pair.eos_ids
    ids_N = torch.arange(length) * 7 % 190 + 3
    with torch.no_grad():
        attend = PaddedAttend(Spans.apart((length,)), model.device)
        found = pair.trained.logits(pair.trained.hidden(ids_N, torch.arange(length), attend))
        assert (found - model(input_ids=ids_N[None], use_cache=False).logits[0]).abs().max() < 1e-4


def test_the_tier_is_chosen_by_what_the_modules_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """An architecture whose own attention does a little more than the one that packing needs."""
    from transformers.models.granite import modeling_granite

    model = small_model("granite")
    model.set_attn_implementation("eager")
    assert not choose_route(model).why
    plain = modeling_granite.eager_attention_forward

    def stranger(*arguments: Any, **given: Any) -> Any:
        values, weights = plain(*arguments, **given)
        return values * 1.05, weights

    monkeypatch.setattr(modeling_granite, "eager_attention_forward", stranger)
    model.set_attn_implementation("eager")
    assert choose_route(model).why


@pytest.mark.parametrize("targets", [["attention"], ["all-linear", "experts"], ["q_proj"]], ids=" and ".join)
def test_an_adapter_of_chosen_layers_is_pefts(
    targets: list[str], local: Local, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    backend = local.make(folders("qwen3_moe"), lora={"targets": targets})
    backend.train(local.roll(backend, requests=REQUESTS, max_tokens=8))
    backend.publish()
    batch = local.roll(backend, requests=REQUESTS, max_tokens=8, step=1)
    adapter = saved(tmp_path / "adapter", backend.save_adapter)
    model = plain_model(folders("qwen3_moe"), adapter).eval()
    assert own_gap(model, batch) < 1e-4
    assert distance(gradient(backend, batch), joined(plain_gradient(batch, model))) < 1e-4
    names = set(backend._pair.parameters)
    assert any("experts" in name for name in names) == ("experts" in targets)
    assert not any("mlp.gate." in name for name in names), "the router stays as it is"


def test_a_layer_that_the_model_lacks_is_named(local: Local, folders: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError) as caught:
        local.pair(folders("qwen3_moe"), lora={"targets": ["c_attn"]})
    assert codes_in(caught) == ["model.unknown-target"]
