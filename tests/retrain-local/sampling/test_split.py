"""Several engines as one: who draws what is fixed, and whatever one of them meets is met by the caller, once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.api import Deliver, Engine, Sample, SampleRequest, SamplingParams, StopReason
from retrain_local.sampling.split import Cancellation, DeviceEngine, ParallelEngine

PARAMS = SamplingParams(max_tokens=1, temperature=1.0)


class Numbered:
    """An engine whose every sample says who drew it, of which prompt, with which seed."""

    delivers_early = True

    def __init__(self, number: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.number, self.meanwhile, self.closed, self.versions = number, meanwhile, 0, 0

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, deliver: Deliver | None = None
    ) -> list[list[Sample]]:
        self.meanwhile()
        drawn = [[self.one(request, seed) for seed in request.seeds_G] for request in requests]
        for group, samples in enumerate(drawn):
            for index, sample in enumerate(samples):
                if deliver is not None:
                    deliver(group, index, sample)
        return drawn

    def one(self, request: SampleRequest, seed: int) -> Sample:
        tokens_T = np.array([self.number, int(request.prompt_T[0]), seed])
        return Sample(tokens_T=tokens_T, logprobs_T=np.zeros(3), stop_reason=StopReason.EOS, policy_version=0)

    def publish(self) -> None:
        self.versions += 1

    def metrics(self) -> dict[str, float]:
        return {"engine_number": float(self.number)} | ({"engine_odd": 1.0} if self.number % 2 else {})

    def close(self) -> None:
        self.closed += 1


class Silent:
    """An engine that delivers nothing early."""

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[list[Sample]]:
        return Numbered(9).sample(requests, params)

    def close(self) -> None:
        pass


def requests(count: int) -> list[SampleRequest]:
    return [SampleRequest(prompt_T=np.array([n]), seeds_G=tuple(range(n % 3 + 1))) for n in range(count)]


def dealer(*engines: Engine, torn: Cancellation | None = None) -> ParallelEngine:
    return ParallelEngine(
        [DeviceEngine(engine=engine, on_device=nullcontext) for engine in engines], torn or Cancellation()
    )


@settings(max_examples=40, deadline=None)
@given(count=st.integers(0, 12), engines=st.integers(1, 4))
def test_request_i_goes_to_engine_i_modulo_their_number_and_comes_back_in_its_place(count: int, engines: int) -> None:
    delivered: dict[tuple[int, int], list[int]] = {}
    thread = threading.get_ident()

    def take(group: int, index: int, sample: Sample) -> None:
        assert threading.get_ident() == thread
        assert (group, index) not in delivered
        delivered[group, index] = sample.tokens_T.tolist()

    subject = dealer(*(Numbered(number) for number in range(engines)))
    drawn = subject.sample(requests(count), PARAMS, take)
    subject.close()
    wanted = {(n, i): [n % engines, n, i] for n in range(count) for i in range(n % 3 + 1)}
    assert {(n, i): s.tokens_T.tolist() for n, group in enumerate(drawn) for i, s in enumerate(group)} == wanted
    assert delivered == wanted


def test_engines_work_at_the_same_time_and_one_may_deliver_nothing_early() -> None:
    meeting = threading.Barrier(3, timeout=30)
    subject = dealer(*(Numbered(number, lambda: meeting.wait() and None) for number in range(3)), Silent())
    drawn = subject.sample(requests(4), PARAMS, lambda *_: None)
    assert [group[0].tokens_T[0] for group in drawn] == [0, 1, 2, 9]
    subject.close()


def test_of_several_errors_the_first_engines_is_raised_whoever_is_faster() -> None:
    failed = threading.Event()

    def late() -> None:
        failed.wait(30)
        raise ValueError("first")

    def early() -> None:
        failed.set()
        raise ValueError("second")

    subject = dealer(Numbered(0, late), Numbered(1, early))
    with pytest.raises(ValueError, match="first"):
        subject.sample(requests(4), PARAMS)
    subject._engines[0].engine.meanwhile = subject._engines[1].engine.meanwhile = lambda: None  # type: ignore[attr-defined]
    assert len(subject.sample(requests(4), PARAMS)) == 4
    subject.close()


def test_an_interrupted_caller_ends_all_engines_before_it_goes_on() -> None:
    torn, ended = Cancellation(), []

    def endless() -> None:
        try:
            while True:
                torn.check()
        finally:
            ended.append(1)

    def take(group: int, index: int, sample: Sample) -> None:
        raise KeyboardInterrupt

    subject = dealer(Numbered(0), Numbered(1, endless), Numbered(2, endless), torn=torn)
    with pytest.raises(KeyboardInterrupt):
        subject.sample(requests(3), PARAMS, take)
    assert len(ended) == 2
    subject.close()


def test_versions_metrics_and_closing_reach_every_engine() -> None:
    engines = [Numbered(number) for number in range(3)]
    subject = dealer(*engines, Silent())
    subject.publish()
    assert [engine.versions for engine in engines] == [1, 1, 1]
    assert subject.metrics() == {"engine_number": 1.0, "engine_odd": 1.0}
    subject.close()
    subject.close()
    assert all(engine.closed for engine in engines)
