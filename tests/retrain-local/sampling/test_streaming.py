"""Tokens as they are sampled: the same as ever, cut where they are refused, and joined by requests that come later."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from retrain.api import (
    BackendError,
    Sample,
    SampleRequest,
    SamplingParams,
    StreamsTokens,
    TopLogprobs,
    TrainRow,
    stream_from,
)
from retrain_local.sampling.engine import SEGMENT
from tests.kit.local_backend import Local
from tests.kit.local_engines import PARAMS, Engines, all_same, paged
from tests.kit.shared import first_or_long


@dataclass
class Kept:
    """A feed that keeps everything; `later` come one by one, each after a call, and `most` tokens are taken."""

    later: list[SampleRequest] = field(default_factory=list)
    most: dict[tuple[int, int], int] = field(default_factory=dict)
    pieces: dict[tuple[int, int], list[Sample]] = field(default_factory=lambda: defaultdict(list))
    done: list[tuple[int, int]] = field(default_factory=list)

    def take(self, request: int, place: int, piece: Sample, *, is_done: bool) -> bool:
        key = (request, place)
        assert key not in self.done, "nothing follows the end"
        self.pieces[key].append(piece)
        self.done += [key] if is_done else []
        return len(self.tokens(key)) < self.most.get(key, 10**9)

    def more(self) -> Sequence[SampleRequest]:
        return [self.later.pop(0)] if self.later else []

    def tokens(self, key: tuple[int, int]) -> list[int]:
        return [token for piece in self.pieces[key] for token in piece.tokens_T.tolist()]

    def whole(self, key: tuple[int, int]) -> Sample:
        pieces = self.pieces[key]
        names = ("tokens_T", "logprobs_T", "entropies_T")
        return replace(pieces[-1], **{name: np.concatenate([getattr(each, name) for each in pieces]) for name in names})


@pytest.mark.parametrize(
    ("pool_tokens", "kernels"), [(2048, None), (128, paged())], ids=["gathered, roomy", "paged, preempting"]
)
def test_a_stream_is_what_sample_returns_whoever_comes_when(engines: Engines, pool_tokens: int, kernels: Any) -> None:
    engine = engines.make(pool_tokens=pool_tokens, kernels=kernels)
    assert isinstance(engine, StreamsTokens)
    feed = Kept(later=list(engines.requests[2:]))
    engine.stream(engines.requests[:2], PARAMS, feed)
    found = [
        [feed.whole((number, place)) for place in range(len(group))] for number, group in enumerate(engines.wanted)
    ]
    all_same(found, engines.wanted)
    assert all(len(piece.tokens_T) <= SEGMENT for pieces in feed.pieces.values() for piece in pieces)
    assert sorted(feed.done) == sorted(feed.pieces), "each is told when it has ended"
    cache = engine._cache
    assert cache.blocks.free == cache.blocks.capacity, "every block came back"


def test_rows_of_earlier_calls_are_few_without_publishing(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrain_local.sampling.engine.KEPT_ROWS", 6)
    engine = engines.make(keep_rows=True, stop_ids=frozenset(), pool_tokens=2**14)
    params, used, kept = replace(PARAMS, max_tokens=8), list[int](), list[int]()
    for number in range(24):
        prompt_T = np.full(20, 5 + number)  # of a new episode each
        engine.stream([SampleRequest(prompt_T=prompt_T, seeds_G=(number, 99 + number))], params, Kept())
        cache = engine._cache
        used.append(cache.blocks.capacity - cache.blocks.free)
        kept.append(len(cache.prefixes))
    assert max(kept) == 6 + 2
    assert used[-1] == max(used) == max(used[:6])
    feed, last = Kept(), SampleRequest(prompt_T=np.full(20, 5), seeds_G=(1,))
    engine.stream([last], params, feed)
    grown_T = np.concatenate([last.prompt_T, feed.whole((0, 0)).tokens_T])
    before = engine._counters.computed_tokens
    engine.stream([SampleRequest(prompt_T=np.append(grown_T, 9), seeds_G=(2,))], params, Kept())
    assert engine._counters.computed_tokens - before < len(grown_T), "the next turn of an episode continues its row"


def test_what_is_refused_ends_there_and_the_others_go_on(engines: Engines) -> None:
    engine, long = engines.make(stop_ids=frozenset()), replace(PARAMS, max_tokens=64)
    feed = Kept(most={(0, 0): 1, (0, 2): 20})
    engine.stream(engines.requests[:1], long, feed)
    lengths = {place: len(feed.tokens((0, place))) for place in range(4)}
    assert lengths == {0: SEGMENT, 1: 64, 2: 24, 3: 64}
    assert sorted(feed.done) == [(0, 1), (0, 3)]
    assert engine._counters.row_steps == sum(lengths.values()), "nothing was decoded for the rest"


@pytest.mark.parametrize("delivers_early", [True, False])
def test_an_engine_without_a_stream_hands_over_whole_completions(engines: Engines, delivers_early: bool) -> None:
    feed, plain = Kept(later=engines.requests[2:4]), SimpleNamespace(delivers_early=delivers_early)
    plain.sample = engines.make().sample
    stream_from(plain, engines.requests[:2], PARAMS, feed)  # type: ignore[arg-type]
    assert all(len(pieces) == 1 for pieces in feed.pieces.values())
    found = [[feed.whole((n, place)) for place in range(len(group))] for n, group in enumerate(engines.wanted[:4])]
    all_same(found, engines.wanted[:4])
    assert sorted(feed.done) == sorted(feed.pieces)


def test_the_likeliest_tokens_are_those_of_the_policy(local: Local, engines: Engines) -> None:
    backend = local.make()
    params = SamplingParams(max_tokens=9, temperature=0.7, greedy=True)
    groups = backend.sample(engines.requests[:3], params)
    rows = []
    for request, (sample, *_) in zip(engines.requests, groups, strict=False):
        tokens_T = np.concatenate([request.prompt_T, sample.tokens_T])
        zeros_T, action_T = np.zeros(len(tokens_T)), np.arange(len(tokens_T)) >= len(request.prompt_T)
        rows.append(TrainRow(tokens_T=tokens_T, action_T=action_T, logprobs_T=zeros_T, advantages_T=zeros_T))
    plain = backend.logprobs(rows, 0.7)
    for row, found, logprobs_T in zip(rows, backend.top_logprobs(rows, 0.7, 3), plain, strict=True):
        assert isinstance(found, TopLogprobs)
        np.testing.assert_allclose(found.logprobs_T, logprobs_T, atol=1e-5)
        assert found.top_ids_TK.shape == found.top_logprobs_TK.shape == (len(row.tokens_T), 3)
        at = row.action_T
        assert found.top_ids_TK[at, 0].tolist() == row.tokens_T[at].tolist(), "greedy takes the likeliest"
        assert (found.top_logprobs_TK[at, 0] == found.logprobs_T[at]).all(), "to the bit, as evaluators compare them"
        assert (np.diff(found.top_logprobs_TK[at], axis=1) <= 0).all()
        assert (found.top_ids_TK[~at] == -1).all()
    assert backend.addresses() == ()
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        backend.stream(engines.requests, PARAMS, Kept())


OF_A_TURN = SamplingParams(max_tokens=12, temperature=0.9, entropy=True)


def first_turn() -> list[SampleRequest]:
    rng = np.random.default_rng(3)
    return [
        SampleRequest(prompt_T=rng.integers(0, 500, size=length), seeds_G=tuple(range(length, length + 3)))
        for length in (20, 33)
    ]


def next_turn(requests: list[SampleRequest], groups: list[list[Sample]], turn: int) -> list[SampleRequest]:
    """Every completion becomes the prompt of a request of its own, with an answer of the environment behind it."""
    rng = np.random.default_rng(turn)
    return [
        SampleRequest(
            prompt_T=np.concatenate([request.prompt_T, sample.tokens_T, rng.integers(0, 500, size=5)]),
            seeds_G=(1000 * turn + 10 * number + place,),
        )
        for number, (request, group) in enumerate(zip(requests, groups, strict=True))
        for place, sample in enumerate(group)
    ]


@pytest.mark.parametrize(("keep", "pool_tokens"), first_or_long([(True, 0), (True, 256), (False, 0)]))
def test_three_turns_equal_three_separate_calls(engines: Engines, keep: bool, pool_tokens: int) -> None:
    engine, requests = engines.make(keep_rows=keep, pool_tokens=pool_tokens), first_turn()
    reuse = []
    for turn in range(3):
        groups = engine.sample(requests, OF_A_TURN)
        all_same(groups, engines.make().sample(requests, OF_A_TURN))
        reuse.append(engine.metrics()["engine_prompt_reuse"])
        requests = next_turn(requests, groups, turn + 1)
    if keep and not pool_tokens:
        new = 5  # of the environment, and the last token of the completion before, less the one that decoding reads
        lengths = [len(r.prompt_T) for r in next_turn(first_turn(), engine.sample(first_turn(), OF_A_TURN), 1)]
        assert reuse[1] == pytest.approx(1 - len(lengths) * new / sum(length - 1 for length in lengths))
        assert reuse[2] > reuse[1]
    if not keep:
        assert reuse[1:] == [0.0, 0.0]


def test_other_weights_and_other_episodes_find_nothing(engines: Engines) -> None:
    engine = engines.make(keep_rows=True)
    requests = first_turn()
    second = next_turn(requests, engine.sample(requests, OF_A_TURN), 1)
    engine.publish()
    engine.metrics()
    engine.sample(second, OF_A_TURN)
    assert engine.metrics()["engine_prompt_reuse"] == 0.0
    cache = engine._cache
    assert len(cache.prefixes) == len(second)
    engine.sample([SampleRequest(prompt_T=np.array([3, 4]), seeds_G=(1,))], OF_A_TURN)
    assert len(cache.prefixes) == 1, "rows of episodes that nobody continues are gone"
    engine.publish()
    assert cache.blocks.free == cache.blocks.capacity


def test_the_same_turns_after_a_resume_are_bit_identical(engines: Engines) -> None:
    """An evaluation that ran before leaves nothing that a resumed run, which never saw it, would lack."""
    once, resumed = engines.make(keep_rows=True, pool_tokens=400), engines.make(keep_rows=True, pool_tokens=400)
    requests = first_turn()
    once.sample([SampleRequest(prompt_T=np.arange(30), seeds_G=(1, 2, 3))], OF_A_TURN)
    for turn in range(3):
        groups = once.sample(requests, OF_A_TURN)
        all_same(groups, resumed.sample(requests, OF_A_TURN), atol=0.0)
        requests = next_turn(requests, groups, turn + 1)
