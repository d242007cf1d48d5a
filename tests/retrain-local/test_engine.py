from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from retrain.api import BackendError, ConfigError, Sample, SampleRequest, SamplingParams, StopReason, generator
from retrain_local.backend import LocalBackend
from retrain_local.engine import PytorchEngine

MakeBackend = Callable[..., LocalBackend]
STOP, VOCABULARY = (500, 501), 512
PARAMS = SamplingParams(max_tokens=40, temperature=0.8, entropy=True)


@pytest.fixture(scope="module")
def requests() -> list[SampleRequest]:
    rng = np.random.default_rng(5)
    return [
        SampleRequest(
            prompt_T=rng.integers(0, 500, size=length), seeds_G=tuple(range(100 * length, 100 * length + count))
        )
        for length, count in ((7, 4), (3, 5), (12, 1), (1, 3), (9, 4))
    ]


def slowly(model: Any, request: SampleRequest, seed: int, params: SamplingParams, stop: set[int]) -> Sample:
    """What the engine must give, said plainly: one row, no cache, no batch."""
    tokens: list[int] = list(request.prompt_T)
    logprobs, entropies, reason = [], [], StopReason.LENGTH
    for u in generator(seed).random(params.max_tokens):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, -1]
        all_logprobs = torch.log_softmax(logits.double() / params.temperature, -1)
        token = int(torch.searchsorted(all_logprobs.exp().cumsum(0), torch.tensor(u).double(), right=True))
        tokens.append(token)
        logprobs.append(float(all_logprobs[token]))
        entropies.append(float(-(all_logprobs.exp() * all_logprobs).sum()))
        if token in stop:
            reason = StopReason.EOS
            break
    return Sample(
        tokens_T=np.array(tokens[len(request.prompt_T) :]),
        logprobs_T=np.array(logprobs),
        entropies_T=np.array(entropies),
        stop_reason=reason,
        policy_version=0,
    )


def same(left: Sample, right: Sample, *, atol: float = 1e-4) -> None:
    assert left.tokens_T.tolist() == right.tokens_T.tolist()
    np.testing.assert_allclose(left.logprobs_T, right.logprobs_T, atol=atol)
    assert left.entropies_T is not None
    assert right.entropies_T is not None
    np.testing.assert_allclose(left.entropies_T, right.entropies_T, atol=atol)
    assert left.stop_reason == right.stop_reason


def test_batched_decoding_equals_the_plain_definition(make_backend: MakeBackend, requests: list[SampleRequest]) -> None:
    backend = make_backend()
    groups = backend.sample(requests, PARAMS)
    assert [len(group) for group in groups] == [4, 5, 1, 3, 4]
    for request, group in zip(requests, groups, strict=True):
        for seed, sample in zip(request.seeds_G, group, strict=True):
            same(sample, slowly(backend._policy.sampler, request, seed, PARAMS, set(STOP)))


def test_each_completion_is_delivered_once_as_soon_as_it_has_ended(
    make_backend: MakeBackend, requests: list[SampleRequest]
) -> None:
    delivered: dict[tuple[int, int], Sample] = {}
    backend = make_backend()

    def deliver(request: int, place: int, sample: Sample) -> None:
        assert (request, place) not in delivered
        delivered[request, place] = sample

    groups = backend.sample(requests, PARAMS, deliver)
    assert len(delivered) == sum(len(group) for group in groups)
    lengths = [len(sample.tokens_T) for sample in delivered.values()]
    assert lengths != sorted(lengths, reverse=True)
    assert lengths[0] < max(lengths), "the shortest come first, not all at the end"
    for (request, place), sample in delivered.items():
        same(sample, groups[request][place], atol=0.0)


def test_rows_end_at_any_stop_id_and_keep_it(make_backend: MakeBackend, requests: list[SampleRequest]) -> None:
    samples = [s for group in make_backend().sample(requests, PARAMS) for s in group]
    ended = [s for s in samples if s.stop_reason is StopReason.EOS]
    assert {int(s.tokens_T[-1]) for s in ended} == set(STOP)
    assert not any(np.isin(s.tokens_T[:-1], STOP).any() for s in samples)
    cut = [s for s in samples if s.stop_reason is StopReason.LENGTH]
    assert cut
    assert all(len(s.tokens_T) == PARAMS.max_tokens for s in cut)
    assert len({len(s.tokens_T) for s in ended}) > 2


def test_a_completion_depends_on_its_prompt_and_seed_alone(
    make_backend: MakeBackend, requests: list[SampleRequest]
) -> None:
    backend = make_backend()
    together = backend.sample(requests, PARAMS)
    for request, group in zip(requests, together, strict=True):
        for seed, sample in zip(request.seeds_G, group, strict=True):
            (alone,) = backend.sample([replace(request, seeds_G=(seed,))], PARAMS)[0]
            same(sample, alone)
    reordered = backend.sample(requests[::-1], PARAMS)[::-1]
    for left, right in zip(together, reordered, strict=True):
        for a, b in zip(left, right, strict=True):
            same(a, b)


def test_max_tokens_only_cuts(make_backend: MakeBackend, requests: list[SampleRequest]) -> None:
    backend = make_backend()
    for long, short in zip(
        backend.sample(requests, PARAMS), backend.sample(requests, replace(PARAMS, max_tokens=5)), strict=True
    ):
        for a, b in zip(long, short, strict=True):
            assert a.tokens_T[:5].tolist() == b.tokens_T.tolist()


def test_prefix_caching_changes_nothing(make_backend: MakeBackend, requests: list[SampleRequest]) -> None:
    shared = make_backend().sample(requests, PARAMS)
    apart = make_backend(inference={"prefix_caching": False}).sample(requests, PARAMS)
    for left, right in zip(shared, apart, strict=True):
        for a, b in zip(left, right, strict=True):
            same(a, b)


@pytest.mark.parametrize("tokens_in_cache", [1, 30, 100, 300])
def test_a_small_cache_puts_rows_aside_and_loses_nothing(
    make_backend: MakeBackend, requests: list[SampleRequest], tokens_in_cache: int
) -> None:
    backend = make_backend()
    whole = backend.sample(requests, PARAMS)
    small = PytorchEngine(backend._policy, cache_bytes=tokens_in_cache * 2 * 4 * 2 * 32 * 4)
    for left, right in zip(whole, small.sample(requests, PARAMS), strict=True):
        for a, b in zip(left, right, strict=True):
            same(a, b)


def test_entropy_only_when_asked(make_backend: MakeBackend, requests: list[SampleRequest]) -> None:
    (sample,) = make_backend().sample([replace(requests[0], seeds_G=(1,))], replace(PARAMS, entropy=False))[0]
    assert sample.entropies_T is None


def test_no_requests_and_no_seeds(make_backend: MakeBackend) -> None:
    backend = make_backend()
    assert backend.sample([], PARAMS) == []
    assert backend.sample([SampleRequest(prompt_T=np.array([1]), seeds_G=())], PARAMS) == [[]]


def test_rows_stop_at_the_end_of_the_context(make_backend: MakeBackend) -> None:
    backend = make_backend()
    backend._policy.stop_ids = frozenset()
    request = SampleRequest(prompt_T=np.arange(500), seeds_G=(1, 2))
    short = SampleRequest(prompt_T=np.arange(490), seeds_G=(3,))
    (first, second), (third,) = backend.sample([request, short], PARAMS)
    assert [len(s.tokens_T) for s in (first, second, third)] == [12, 12, 22]
    assert first.stop_reason is StopReason.LENGTH


def test_a_prompt_that_fills_the_context_is_refused(make_backend: MakeBackend) -> None:
    with pytest.raises(ConfigError, match="leaves no room"):
        make_backend().sample([SampleRequest(prompt_T=np.zeros(512, dtype=np.int64), seeds_G=(1,))], PARAMS)


@pytest.mark.parametrize("prompt", [[], [-1], [VOCABULARY], [[1, 2]]])
def test_unreadable_prompts(make_backend: MakeBackend, prompt: Any) -> None:
    with pytest.raises(BackendError, match="prompt 0"):
        make_backend().sample([SampleRequest(prompt_T=np.array(prompt, dtype=np.int64), seeds_G=(1,))], PARAMS)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_logits_are_named(make_backend: MakeBackend, requests: list[SampleRequest], bad: float) -> None:
    backend = make_backend()
    with torch.no_grad():
        backend._policy.sampler.model.norm.weight[0] = bad
    with pytest.raises(BackendError, match="non-finite logits at token 0 of a completion of prompt 0"):
        backend.sample(requests, PARAMS)


SMALL = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILY = SMALL | {"intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 128}
ARCHITECTURES = {
    "llama": transformers.LlamaConfig(**FAMILY),
    "qwen2": transformers.Qwen2Config(**FAMILY),
    "mistral-sliding": transformers.MistralConfig(**FAMILY, sliding_window=6),
    "gemma2-soft-cap": transformers.Gemma2Config(**FAMILY, head_dim=16, sliding_window=6, query_pre_attn_scalar=16),
    "gemma3-text": transformers.Gemma3TextConfig(
        **FAMILY, head_dim=16, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2-conv1d": transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=128),
    "opt-learned-positions": transformers.OPTConfig(
        **SMALL, ffn_dim=96, max_position_embeddings=128, word_embed_proj_dim=64
    ),
    "granite-scaled-logits": transformers.GraniteConfig(**FAMILY, logits_scaling=2.0),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(
    name: str,
    tmp_path: Path,
    make_backend: MakeBackend,
    requests: list[SampleRequest],
    roll: Callable[..., Any],
    save_model: Callable[[Path, Any], Path],
) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(ARCHITECTURES[name])
    backend = make_backend(save_model(tmp_path, model))
    params = replace(PARAMS, max_tokens=20)
    stop = set(backend._policy.stop_ids)
    for request, group in zip(requests[:4], backend.sample(requests[:4], params), strict=True):
        same(group[0], slowly(backend._policy.sampler, request, request.seeds_G[0], params, stop))
    for step in range(2):
        report = backend.train(roll(backend, requests, step=step, temperature=0.7))
        assert abs(report.ratio_max - 1) < 1e-4
        assert report.gap_max < 1e-4
        assert report.grad_norm > 0
        backend.publish()
