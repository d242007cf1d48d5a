"""Samples over HTTP: exact, in order, delivered early, and of the version they claim."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from retrain.api import (
    BackendError,
    ConfigError,
    DeliversEarly,
    LogprobRow,
    Measuring,
    Publishing,
    SampleRequest,
    SamplingParams,
    ServedElsewhere,
    TakesWeights,
)
from retrain.credit.logprob_gap import LogprobGap, measure_gap
from retrain.engines.engine import ServerEngine
from retrain.engines.policy_check import PROBE_TOKENS, probe_prompts
from retrain.kernel.types import Sample, StopReason
from tests.kit.inference_server import InferenceServer, changed, serving
from tests.kit.toy_policy import STOP, ToyModel, ToyPolicy


def gap_to_trainer(
    policy: ToyPolicy, requests: list[SampleRequest], groups: list[list[Sample]], temperature: float
) -> float:
    pairs = [(r.prompt_T, sample) for r, group in zip(requests, groups, strict=True) for sample in group]
    rows = [LogprobRow.of(np.asarray(prompt_T), sample.tokens_T) for prompt_T, sample in pairs]
    ours = policy.logprobs(rows, temperature)
    assert ours is not None
    matched = zip(ours, rows, pairs, strict=True)
    return LogprobGap.of([all_T[action_T] - s.logprobs_T for all_T, (_, action_T), (_, s) in matched]).max


def test_samples_are_in_order_and_exact_over_several_versions(make_engine, server, policy, requests, params) -> None:
    engine: ServerEngine = make_engine(server)
    for version in range(4):
        groups = engine.sample(requests, params)
        assert [len(group) for group in groups] == [4, 3, 1, 5]
        assert {s.policy_version for group in groups for s in group} == {version}
        assert gap_to_trainer(policy, requests, groups, params.temperature) < 1e-9
        policy.train()
        engine.publish()


def test_stop_reasons_and_lengths(make_engine, server, policy, requests) -> None:
    engine = make_engine(server)
    policy.model.table[:, 0] += 4.5  # the server's model is another object
    server.model.table[:, 0] += 4.5
    groups = engine.sample(requests, SamplingParams(max_tokens=12, temperature=0.7))
    samples = [sample for group in groups for sample in group]
    for sample in samples:
        ended = int(sample.tokens_T[-1]) in STOP
        assert sample.stop_reason is (StopReason.EOS if ended else StopReason.LENGTH)
        assert ended or len(sample.tokens_T) == 12
        assert not np.isin(sample.tokens_T[:-1], list(STOP)).any()
    assert {sample.stop_reason for sample in samples} == {StopReason.EOS, StopReason.LENGTH}


def test_each_completion_is_a_request_with_its_own_seed_and_the_full_distribution(
    make_engine, server, requests, params
) -> None:
    engine = make_engine(server)
    server.requests.clear()
    engine.sample(requests, params)
    asked = server.completions
    assert sorted(body["seed"] for body in asked) == sorted(seed for r in requests for seed in r.seeds_G)
    for body in asked:
        assert "n" not in body
        assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1.0, -1, 0.0, 1.0)
        assert body["temperature"] == 0.7
        assert all(type(token) is int for token in body["prompt"])
        assert set(body["stop_token_ids"]) == STOP


def test_greedy_asks_for_temperature_zero(make_engine, server, requests, params) -> None:
    engine = make_engine(server)
    server.requests.clear()
    groups = engine.sample(requests, replace(params, greedy=True))
    assert {body["temperature"] for body in server.completions} == {0.0}
    assert all(len({tuple(sample.tokens_T) for sample in group}) == 1 for group in groups), "whatever the seed"


def test_other_programs_learn_where_the_policy_is_served_and_as_what(make_engine, server) -> None:
    engine = make_engine(server)
    assert isinstance(engine, ServedElsewhere)
    ((url, name),) = engine.addresses()
    assert url == f"{server.url}/v1"
    assert name in server.adapters


def test_samples_are_delivered_as_they_finish(make_engine, server, requests, params) -> None:
    engine = make_engine(server, max_concurrent=1)
    seen: list[tuple[int, int]] = []
    asked_at_delivery: list[int] = []
    server.requests.clear()

    def deliver(group: int, index: int, sample: Sample) -> None:
        seen.append((group, index))
        asked_at_delivery.append(len(server.completions))

    groups = engine.sample(requests, params, deliver)
    assert sorted(seen) == [(g, i) for g, group in enumerate(groups) for i in range(len(group))]
    assert asked_at_delivery[0] < len(seen)


def test_the_same_seeds_give_the_same_tokens_where_the_server_honours_them(
    make_engine, server, requests, params
) -> None:
    engine = make_engine(server)
    first, second = engine.sample(requests, params), engine.sample(requests, params)
    for a, b in zip(first, second, strict=True):
        assert all(np.array_equal(x.tokens_T, y.tokens_T) for x, y in zip(a, b, strict=True))


def test_a_completion_never_outgrows_the_context(make_engine, server, policy) -> None:
    engine = make_engine(server)
    stream = np.random.default_rng(3)
    full = SampleRequest(prompt_T=stream.integers(3, 500, size=636), seeds_G=(1,))
    (group,) = engine.sample([full], SamplingParams(max_tokens=50, temperature=0.7))
    assert len(group[0].tokens_T) <= 4
    over = SampleRequest(prompt_T=stream.integers(3, 500, size=640), seeds_G=(1,))
    with pytest.raises(ConfigError, match="context of 640 leaves no room"):
        engine.sample([over], SamplingParams(max_tokens=50, temperature=0.7))


@pytest.mark.parametrize("prompt", [[], [512], [-1], [3, 10**9]])
def test_a_prompt_that_could_kill_a_server_is_not_sent(make_engine, server, params, prompt) -> None:
    engine = make_engine(server)
    server.requests.clear()
    with pytest.raises(BackendError, match="prompt 0"):
        engine.sample([SampleRequest(prompt_T=np.asarray(prompt, dtype=np.int64), seeds_G=(1,))], params)
    assert not server.requests


def test_sampling_from_an_unpublished_version_is_an_error(make_engine, server, policy, requests, params) -> None:
    engine = make_engine(server)
    policy.train()
    with pytest.raises(BackendError, match="have policy version 0, and version 1 was published"):
        engine.sample(requests, params)


def test_with_staleness_the_next_version_may_be_on_its_way(make_engine, server, policy, requests, params) -> None:
    engine = make_engine(server)
    engine._is_ahead = True
    policy.train()
    drawn = engine.sample(requests, params)
    assert {sample.policy_version for group in drawn for sample in group} == {0}
    engine.publish()
    drawn = engine.sample(requests, params)
    assert {sample.policy_version for group in drawn for sample in group} == {1}


def test_several_servers_share_the_load_and_all_have_the_policy(make_engine, policy, requests, params) -> None:
    with serving(ToyModel()) as one, serving(ToyModel()) as two:
        one.latency_s = two.latency_s = 0.02
        engine = make_engine(one, two)
        policy.train()
        engine.publish()
        for server in (one, two):
            server.requests.clear()
        groups = engine.sample(requests, params)
        assert gap_to_trainer(policy, requests, groups, 0.7) < 1e-9
        counts = len(one.completions), len(two.completions)
        assert sum(counts) == 13
        assert min(counts) >= 5


def test_trainer_mode_recomputes_and_keeps_the_engines_own_numbers(make_engine, server, policy, requests) -> None:
    engine = make_engine(server, logprobs="trainer", max_gap=1.0)
    server.always = changed(token_logprobs=lambda values: [value - 0.01 for value in values])
    groups = engine.sample(requests, SamplingParams(max_tokens=12, temperature=0.7))
    assert gap_to_trainer(policy, requests, groups, 0.7) < 1e-12
    for group in groups:
        for sample in group:
            assert sample.engine_logprobs_T is not None
            np.testing.assert_allclose(sample.logprobs_T - sample.engine_logprobs_T, 0.01, atol=1e-9)
    fields = engine.metrics()
    assert fields["engine_gap_mean"] == pytest.approx(0.01)
    assert fields["engine_gap_max"] == pytest.approx(0.01)
    assert "engine_gap_mean" not in engine.metrics()


def test_a_server_before_temperature_is_compared_at_temperature_one(make_engine, policy, requests) -> None:
    with serving(ToyModel(), processed=False) as server:
        engine = make_engine(server, logprobs="trainer")
        policy.train()
        engine.publish()
        groups = engine.sample(requests, SamplingParams(max_tokens=12, temperature=0.7))
        assert gap_to_trainer(policy, requests, groups, 0.7) < 1e-12
        assert all(sample.engine_logprobs_T is None for group in groups for sample in group)
        assert 0.0 < engine.metrics()["engine_gap_max"] < 1e-9


def test_trainer_mode_needs_the_training_model_in_this_process(make_engine, server, policy, requests, params) -> None:
    policy.is_remote = True
    engine = make_engine(server, logprobs="trainer")
    with pytest.raises(BackendError, match="not in this process"):
        engine.sample(requests, params)


def test_no_prefix_caching_gives_each_completion_a_cache_of_its_own(make_engine, server, requests, params) -> None:
    engine = make_engine(server, prefix_caching=False)
    server.requests.clear()
    engine.sample(requests, params)
    salts = [body["cache_salt"] for body in server.completions]
    assert len(set(salts)) == len(salts) == 13


def test_what_an_engine_can_do_is_said(make_engine, server) -> None:
    engine = make_engine(server)
    assert isinstance(engine, Publishing)
    assert isinstance(engine, TakesWeights)
    assert isinstance(engine, Measuring)
    assert isinstance(engine, DeliversEarly)
    assert engine.delivers_early


def test_all_weights_can_be_replaced_by_a_trainer_elsewhere(
    make_engine, server, policy, requests, params, tmp_path
) -> None:
    engine = make_engine(server)
    policy.train()
    policy.save_adapter(tmp_path)
    engine.load_weights(tmp_path, policy.version)
    paths = [path for path, _ in server.requests]
    assert [path for path in paths if not path.startswith("/v1")] == [
        "/pause?mode=keep&clear_cache=false",
        "/update_weights",
        "/resume",
    ]
    groups = engine.sample(requests, params)
    assert {sample.policy_version for group in groups for sample in group} == {1}


def test_an_adapter_of_a_trainer_elsewhere_is_loaded_under_a_new_name(
    make_engine, server, policy, requests, params, tmp_path
) -> None:
    engine = make_engine(server)
    policy.train()
    policy.save_adapter(tmp_path)
    engine.load_adapter(tmp_path, policy.version)
    groups = engine.sample(requests, params)
    assert gap_to_trainer(policy, requests, groups, 0.7) < 1e-9
    engine.close()
    assert (tmp_path / "adapter_model.safetensors").exists()


def test_doctor_can_measure_an_engine_through_its_backend(make_engine, server, policy, tokenizer) -> None:
    engine = make_engine(server)

    class Backend:
        sample = engine.sample
        logprobs = policy.logprobs

    prompts, params = probe_prompts(tokenizer, 640), SamplingParams(max_tokens=PROBE_TOKENS, temperature=0.7)
    gap = measure_gap(Backend, prompts, params)
    assert gap is not None
    assert gap.max < 1e-9
    assert gap.num_tokens > 50
    assert measure_gap(object(), prompts, params) is None


def test_a_gap_that_is_not_finite_is_never_a_small_one(make_engine, server, policy) -> None:
    assert np.isnan(LogprobGap.of([np.array([0.0, np.inf])]).mean)
    engine = make_engine(server)
    trained = policy.logprobs
    policy.logprobs = lambda rows, temperature: [values_T * np.nan for values_T in trained(rows, temperature)]
    policy.train()
    with pytest.raises(BackendError, match="does not sample from policy version 1"):
        engine.publish()


def test_closing_unloads_and_removes_everything(make_engine, policy, requests, params, tmp_path) -> None:
    with serving(ToyModel()) as server:
        engine = make_engine(server, adapter_dir=str(tmp_path / "shared"))
        policy.train()
        engine.publish()
        assert len(server.adapters) == 2
        engine.close()
        engine.close()
        assert not server.adapters
        assert not list((tmp_path / "shared").iterdir())
        with pytest.raises(BackendError, match="the engine is closed"):
            engine.sample(requests, params)


def test_a_key_goes_into_the_header_and_nowhere_else(make_engine, monkeypatch, caplog) -> None:
    monkeypatch.setenv("TOY_SERVER_KEY", "planted-secret-123")
    with serving(ToyModel(), key="planted-secret-123") as server:
        make_engine(server, api_key_env="TOY_SERVER_KEY")
        with pytest.raises(BackendError) as caught:
            make_engine(server)
    assert "api_key_env" in str(caught.value)
    assert "planted-secret" not in caplog.text + str(caught.value)


def test_an_empty_key_is_told_before_anything_is_asked(make_engine, server) -> None:
    with pytest.raises(ConfigError, match="TOY_SERVER_KEY is empty"):
        make_engine(server, api_key_env="TOY_SERVER_KEY")
    assert not server.requests


def test_a_login_in_the_url_is_never_shown(make_context, policy) -> None:
    from retrain.engines.engine import create
    from retrain.engines.vllm import VLLM

    context = make_context(["http://user:planted-login@127.0.0.1:9"])
    with pytest.raises(BackendError) as caught:
        create(VLLM(), context, policy)
    assert "planted-login" not in str(caught.value)
    assert "http://127.0.0.1:9" in str(caught.value)


def test_a_sample_of_another_policy_is_not_taken_for_this_ones(make_engine, server: InferenceServer, policy) -> None:
    engine = make_engine(server)
    other = replace(policy, weights={name: value + 1.0 for name, value in policy.weights.items()})
    server.adapters = dict.fromkeys(server.adapters, other.weights)  # somebody else meddles
    server.caches.clear()
    policy.train()
    server.deaf = True
    with pytest.raises(BackendError, match="does not sample from policy version 1"):
        engine.publish()
