from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from retrain.api import BackendError, RetrainError, SampleRequest, StopReason
from tests.kit.hf_models import LIKE_LLAMA, SERVED, hf_model
from tests.kit.local_backend import Local, write_model
from tests.kit.local_engines import PARAMS, Engines, Plain, all_same, paged
from tests.kit.problems import codes_in
from tests.kit.shared import first_or_long, slow_or_long


@pytest.mark.parametrize("kernels", [None, paged()], ids=["gathered", "paged"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_batched_decoding_equals_the_plain_definition(engines: Engines, prefix_caching: bool, kernels: Any) -> None:
    engine = engines.make(prefix_caching=prefix_caching, kernels=kernels)
    all_same(engine.sample(engines.requests, PARAMS), engines.wanted)
    lengths = [(len(r.prompt_T) - 1, len(r.seeds_G)) for r in engines.requests]
    total = sum(length * count for length, count in lengths)
    computed = sum(length for length, _ in lengths) if prefix_caching else total  # a prompt once for its group
    assert engine.metrics()["engine_prompt_reuse"] == pytest.approx(1 - computed / total)
    assert engine.metrics() == {}, "each number is reported once"


@pytest.mark.parametrize("pool_tokens", first_or_long([96, 128, 200, 320, 640]))
def test_a_small_pool_puts_rows_aside_and_loses_nothing(engines: Engines, pool_tokens: int) -> None:
    engine = engines.make(pool_tokens=pool_tokens)
    all_same(engine.sample(engines.requests, PARAMS), engines.wanted)
    assert engine._policy.limits.cache_tokens == pool_tokens, "it was enough"
    again = engine.sample(engines.requests, PARAMS)
    all_same(again, engines.make(pool_tokens=pool_tokens).sample(engines.requests, PARAMS), atol=0.0)
    cache = engine._cache
    assert cache.blocks.free == cache.blocks.capacity, "every block came back"


@pytest.mark.parametrize("kernels", [None, paged()], ids=["gathered", "paged"])
def test_greedy_completions_are_those_of_transformers(engines: Engines, kernels: Any) -> None:
    params = replace(PARAMS, max_tokens=24, greedy=True)
    groups = engines.make(kernels=kernels).sample(engines.requests, params)
    for request, group in zip(engines.requests, groups, strict=True):
        prompt_1T = torch.tensor(np.asarray(request.prompt_T)[None])
        config = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=[500, 501], pad_token_id=500)
        wanted = engines.plain.model.generate(prompt_1T, config, attention_mask=torch.ones_like(prompt_1T))
        expected = wanted[0, len(request.prompt_T) :].tolist()
        assert [sample.tokens_T.tolist() for sample in group] == [expected] * len(request.seeds_G)
        with torch.no_grad():
            logits_TV = engines.plain.model(wanted).logits[0, len(request.prompt_T) - 1 : -1]
        logprobs_TV = torch.log_softmax(logits_TV.double() / PARAMS.temperature, -1)
        np.testing.assert_allclose(group[0].logprobs_T, logprobs_TV.max(-1).values.numpy(), atol=1e-4)


def test_a_completion_depends_on_its_prompt_and_seed_alone(engines: Engines) -> None:
    engine = engines.make()
    together = engine.sample(engines.requests, PARAMS)
    for request, group in zip(engines.requests, together, strict=True):
        for seed, sample in zip(request.seeds_G, group, strict=True):
            all_same([[sample]], engine.sample([replace(request, seeds_G=(seed,))], PARAMS))
    all_same(together, engine.sample(engines.requests[::-1], PARAMS)[::-1])


def test_no_requests_and_no_seeds(engines: Engines) -> None:
    engine = engines.make()
    assert engine.sample([], PARAMS) == []
    assert engine.sample([SampleRequest(prompt_T=np.array([1]), seeds_G=())], PARAMS) == [[]]
    assert engine.metrics() == {}
    one = replace(engines.requests[0], seeds_G=(1,))
    assert engine.sample([one], replace(PARAMS, entropy=False))[0][0].entropies_T is None


def test_rows_stop_at_the_end_of_the_context(engines: Engines) -> None:
    engine = engines.make(stop_ids=frozenset())
    request = SampleRequest(prompt_T=np.arange(500), seeds_G=(1, 2))
    short = SampleRequest(prompt_T=np.arange(490), seeds_G=(3,))
    (first, second), (third,) = engine.sample([request, short], PARAMS)
    assert [len(s.tokens_T) for s in (first, second, third)] == [12, 12, 22]
    assert first.stop_reason is StopReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([], "data.empty-prompt"),
        ([[1, 2]], "data.empty-prompt"),
        ([-1], "model.other-tokenizer"),
        ([512], "model.other-tokenizer"),
        ([0] * 512, "data.prompt-too-long"),
    ],
)
def test_impossible_prompts_are_refused(engines: Engines, prompt: Any, code: str) -> None:
    with pytest.raises(RetrainError, match="prompt 0") as caught:
        engines.make().sample([SampleRequest(prompt_T=np.array(prompt, dtype=np.int64), seeds_G=(1,))], PARAMS)
    assert codes_in(caught) == [code]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_logits_are_named_and_leave_nothing_behind(engines: Engines, bad: float) -> None:
    decoder: Any = engines.decoder()
    engine, hidden = engines.make(decoder), decoder.hidden

    def spoilt(ids_N: torch.Tensor, positions_N: torch.Tensor, attend: Any) -> torch.Tensor:
        def attend_badly(layer: int, queries: Any, keys: Any, values: Any, scores: Any) -> Any:
            return attend(layer, queries, keys * bad, values * bad, scores)

        return hidden(ids_N, positions_N, attend_badly) * bad  # type: ignore[no-any-return]

    decoder.hidden = spoilt
    with pytest.raises(BackendError, match="token 0 of a completion of prompt 0") as caught:
        engine.sample(engines.requests, PARAMS)
    assert codes_in(caught) == ["run.non-finite-logits"]
    decoder.hidden = hidden
    all_same(engine.sample(engines.requests, PARAMS), engines.make().sample(engines.requests, PARAMS), atol=0.0)


def test_whoever_asks_for_a_stop_is_heard_in_the_middle(engines: Engines) -> None:
    answers = iter([None, KeyboardInterrupt("stop")])

    def check() -> None:
        if error := next(answers, None):
            raise error

    engine = engines.make(check_stop=check)
    with pytest.raises(KeyboardInterrupt):
        engine.sample(engines.requests, PARAMS)
    all_same(engine.sample(engines.requests, PARAMS), engines.wanted)


# Sizes of transformers' configurations: of our own decoders, and of those that transformers computes for us.
FAMILY = LIKE_LLAMA | {"head_dim": 16}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
ARCHITECTURES = SERVED | {"Llama": FAMILY, "Qwen2": FAMILY, "Mistral": FAMILY | {"sliding_window": 6}}
ARCHITECTURES["Gemma3Text"] = FAMILY | WINDOWS


@pytest.mark.parametrize("name", slow_or_long(ARCHITECTURES, "Gemma2", "Mistral"))
def test_architectures(name: str, tmp_path: Path, local: Local, engines: Engines) -> None:
    sizes = {"vocab_size": 512, "n_positions" if name == "GPT2" else "max_position_embeddings": 128}
    folder = write_model(tmp_path, hf_model(name, ARCHITECTURES[name] | sizes))
    backend, plain, params = local.make(folder), Plain(folder), replace(PARAMS, max_tokens=20)
    firsts = [replace(request, seeds_G=request.seeds_G[:1]) for request in engines.requests]
    all_same([group[:1] for group in backend.sample(engines.requests, params)], plain.all(firsts, params))
    for step in range(2):
        report = backend.train(local.roll(backend, requests=engines.requests, step=step, temperature=0.7))
        assert abs(report.ratio_max - 1) < 1e-4
        assert report.gap_max < 1e-4
        assert report.grad_norm > 0
        backend.publish()


GAPS = {"bf16": (3e-3, 2e-2), "int8": (1e-2, 6e-2), "fp8": (4e-2, 2.5e-1)}  # mean and largest, nats per token


def gaps(plain: Plain, requests: list[SampleRequest], groups: list[list[Any]]) -> np.ndarray:
    """Of every sampled token, |what the engine said - what the exact model says after the same tokens|."""
    found = []
    for request, group in zip(requests, groups, strict=True):
        for sample in group:
            row = np.concatenate([request.prompt_T, sample.tokens_T])
            with torch.no_grad():
                logits = plain.model(input_ids=torch.from_numpy(row)[None]).logits[0, len(request.prompt_T) - 1 : -1]
            exact = torch.log_softmax(logits.double() / PARAMS.temperature, -1)
            found.append(exact.gather(1, torch.from_numpy(sample.tokens_T)[:, None])[:, 0].numpy() - sample.logprobs_T)
    return np.abs(np.concatenate(found))


@pytest.mark.parametrize("kind", first_or_long(GAPS))
def test_the_gap_is_small_and_not_nothing(engines: Engines, kind: str) -> None:
    engine = engines.make(cache_dtype=kind)
    found = gaps(engines.plain, engines.requests, engine.sample(engines.requests, PARAMS))
    mean, largest = GAPS[kind]
    assert 1e-6 < found.mean() < mean
    assert found.max() < largest


@pytest.mark.parametrize("kind", first_or_long(GAPS))
def test_put_aside_and_turns_work_in_every_pool(engines: Engines, kind: str) -> None:
    engine = engines.make(cache_dtype=kind, pool_tokens=192, keep_rows=True)
    groups = engine.sample(engines.requests, PARAMS)
    longer = [
        SampleRequest(prompt_T=np.concatenate([r.prompt_T, g[0].tokens_T, [1, 2]]), seeds_G=(1,))
        for r, g in zip(engines.requests, groups, strict=True)
    ]
    for asked, drawn in ((engines.requests, groups), (longer, engine.sample(longer, PARAMS))):
        assert gaps(engines.plain, asked, drawn).mean() < GAPS[kind][0]


def test_a_sampler_in_bf16(engines: Engines) -> None:
    engine = engines.make(engines.decoder(dtype=torch.bfloat16))
    found = gaps(engines.plain, engines.requests, engine.sample(engines.requests, PARAMS))
    assert 1e-5 < found.mean() < 2e-2
    assert engine._cache.pool.layers[0].keys.dtype is torch.bfloat16
