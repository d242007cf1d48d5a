from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.api import BackendError, NonFiniteError, PluginContext, SampleRequest, SamplingParams, Throttle
from retrain_tinker.backend import TinkerBackend, create_backend
from tests.kit.problems import codes_in
from tests.kit.tinker_rows import PROMPT, batch_of, drawn
from tests.kit.tinker_server import serving
from tests.kit.tinker_toy import Gate, Toy

Make = Callable[..., TinkerBackend]


# ---------------------------------------------------------------- while sampling


@pytest.mark.long
@pytest.mark.parametrize("statuses", [[429, 429], [500, 502, 504], [408]], ids=str)
def test_a_storm_of_refusals_is_weathered(backend: Make, toy: Toy, statuses: list[int]) -> None:
    made = backend()
    toy.faults.statuses["asample" if 429 in statuses else "retrieve_future"] = list(statuses)
    _, samples = drawn(made)
    assert [len(group) for group in samples] == [4, 4]


def test_completions_that_never_come_meet_our_deadline(backend: Make, toy: Toy) -> None:
    made = backend(options__timeout_s=1.0)
    toy.faults.hang.add("retrieve_future")
    with pytest.raises(BackendError, match="8 of 8 completions are missing: no answer within 1 s"):
        drawn(made)


@pytest.mark.parametrize(
    ("fault", "words"),
    [("no_sample_logprobs", "tokens with 0 log-probabilities"), ("drop_stop_token", "without returning the token")],
)
def test_completions_that_cannot_be_trained_on_are_refused(backend: Make, toy: Toy, fault: str, words: str) -> None:
    made = backend()
    setattr(toy.faults, fault, True)
    with pytest.raises(BackendError, match=words):
        drawn(made, count=16, max_tokens=60)


def test_a_prompt_that_fills_the_context_is_refused(backend: Make) -> None:
    made = backend()
    made.sampler = replace(made.sampler, context_limit=5)
    params = SamplingParams(max_tokens=10, temperature=1.0)
    (group,) = made.sample([SampleRequest(prompt_T=PROMPT, seeds_G=(1, 2, 3))], params)
    assert max(len(sample.tokens_T) for sample in group) <= 2
    with pytest.raises(BackendError, match="leaves no room in a context of 5"):
        made.sample([SampleRequest(prompt_T=np.arange(1, 6), seeds_G=(1,))], params)


@pytest.mark.long
def test_a_service_that_comes_back_in_mid_step_is_waited_for(toy: Toy, context: Callable[..., PluginContext]) -> None:
    with serving(toy) as address:
        made = create_backend(context(model__base_url=address))
        requests, samples = drawn(made)
    port = int(address.rpartition(":")[2])
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(drawn(made, first_seed=9)))
    waiting.start()
    time.sleep(0.5)
    with serving(toy, port):
        waiting.join()
        assert [len(group) for group in found[0][1]] == [4, 4]
        made.train(batch_of(requests, samples))
        made.close()


@pytest.mark.long
def test_all_completions_are_in_flight_at_once(backend: Make, toy: Toy) -> None:
    """The service gives nothing out before 64 results are waited for, so fewer at a time would wait for ever."""
    made = backend(options__timeout_s=200.0)
    toy.faults.gate = Gate(64)
    _, samples = drawn(made, count=64, prompts=2, max_tokens=2)
    assert [len(group) for group in samples] == [64, 64]


# ---------------------------------------------------------------- while training


def test_a_step_that_is_not_finite_changes_nothing_and_its_gradient_is_dropped(backend: Make, toy: Toy) -> None:
    made = backend()
    batch = batch_of(*drawn(made))
    made.train(batch)
    made.publish()
    calls = toy.count("forward_backward")
    broken = replace(batch.rows[0], advantages_T=np.where(batch.rows[0].action_T, np.nan, 0.0))
    with pytest.raises(NonFiniteError) as caught:
        made.train(replace(batch, rows=(broken, *batch.rows[1:])))
    assert codes_in(caught) == ["tinker.non-finite-row"]
    assert toy.count("forward_backward") == calls, "it is never sent"
    (before,) = toy.adapters.values()
    kept, moments, steps = before.delta.copy(), before.first.copy(), before.steps
    next_batch = batch_of(*drawn(made, first_seed=50))
    toy.faults.nan_logprobs = True
    with pytest.raises(NonFiniteError, match="not finite: log-probabilities of row 0"):
        made.train(next_batch)
    toy.faults.nan_logprobs = False
    (after,) = toy.adapters.values()
    assert after.delta == pytest.approx(kept)
    assert after.first == pytest.approx(moments)
    assert after.steps == steps
    drawn(made)
    made.train(next_batch)
    assert made.publish() == 2
    drawn(made)


def test_a_failed_gradient_never_gets_into_a_later_step(backend: Make, toy: Toy) -> None:
    """The service may have added it although no answer came, so the client is replaced before the next step."""
    made = backend()
    batch = batch_of(*drawn(made))
    toy.faults.short_logprobs = True
    with pytest.raises(BackendError, match="other lengths"):
        made.train(batch)
    assert toy.count("optim_step") == 0
    toy.faults.short_logprobs = False
    other = batch_of(*drawn(made, first_seed=70))
    made.train(other)
    made.publish()
    (found,) = toy.adapters.values()
    clean = Toy()
    with serving(clean) as address:
        second = backend(model__base_url=address)
        second.train(other)
        (wanted,) = clean.adapters.values()
        assert found.delta == pytest.approx(wanted.delta)
        second.close()


# ---------------------------------------------------------------- together with other runs


def test_a_throttle_bounds_the_runs_that_call_at_a_time(backend: Make, toy: Toy, tmp_path: Path) -> None:
    made = backend(backend__throttle_dir=str(tmp_path), backend__max_concurrent=1)
    batch, before = batch_of(*drawn(made)), len(toy.calls)
    for call in (lambda: drawn(made, first_seed=9), lambda: made.train(batch)):
        waiting = threading.Thread(target=call)
        with Throttle(tmp_path, 1).slot():  # of another run
            waiting.start()
            while not list(tmp_path.glob("ticket_*.lock")):
                time.sleep(0.005)
            assert {path for path, _ in toy.calls[before:]} <= {"session_heartbeat", "telemetry"}
        waiting.join()
        assert len(toy.calls) > before
        before = len(toy.calls)
