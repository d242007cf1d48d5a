"""Episodes of several turns: a prompt that begins with an earlier row is not computed again."""

from __future__ import annotations

import numpy as np
import pytest

from retrain.api import Sample, SampleRequest, SamplingParams
from tests.kit.local_engines import Engines, all_same
from tests.kit.shared import first_or_long

PARAMS = SamplingParams(max_tokens=12, temperature=0.9, entropy=True)


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
        groups = engine.sample(requests, PARAMS)
        all_same(groups, engines.make().sample(requests, PARAMS))
        reuse.append(engine.metrics()["engine_prompt_reuse"])
        requests = next_turn(requests, groups, turn + 1)
    if keep and not pool_tokens:
        new = 5  # of the environment, and the last token of the completion before, less the one that decoding reads
        lengths = [len(r.prompt_T) for r in next_turn(first_turn(), engine.sample(first_turn(), PARAMS), 1)]
        assert reuse[1] == pytest.approx(1 - len(lengths) * new / sum(length - 1 for length in lengths))
        assert reuse[2] > reuse[1]
    if not keep:
        assert reuse[1:] == [0.0, 0.0]


def test_other_weights_and_other_episodes_find_nothing(engines: Engines) -> None:
    engine = engines.make(keep_rows=True)
    requests = first_turn()
    second = next_turn(requests, engine.sample(requests, PARAMS), 1)
    engine.publish()
    engine.metrics()
    engine.sample(second, PARAMS)
    assert engine.metrics()["engine_prompt_reuse"] == 0.0
    cache = engine._cache
    assert cache is not None
    assert len(cache.prefixes) == len(second)
    engine.sample([SampleRequest(prompt_T=np.array([3, 4]), seeds_G=(1,))], PARAMS)
    assert len(cache.prefixes) == 1, "rows of episodes that nobody continues are gone"
    engine.publish()
    assert cache.blocks.free == cache.blocks.capacity


def test_the_same_turns_after_a_resume_are_bit_identical(engines: Engines) -> None:
    """An evaluation that ran before leaves nothing that a resumed run, which never saw it, would lack."""
    once, resumed = engines.make(keep_rows=True, pool_tokens=400), engines.make(keep_rows=True, pool_tokens=400)
    requests = first_turn()
    once.sample([SampleRequest(prompt_T=np.arange(30), seeds_G=(1, 2, 3))], PARAMS)
    for turn in range(3):
        groups = once.sample(requests, PARAMS)
        all_same(groups, resumed.sample(requests, PARAMS), atol=0.0)
        requests = next_turn(requests, groups, turn + 1)
