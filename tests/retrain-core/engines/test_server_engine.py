"""Samples over HTTP: exact, in order, delivered early, and of the version they claim, whoever trained it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.api import (
    BackendError,
    ConfigError,
    Kind,
    LogprobRow,
    PluginContext,
    Sample,
    SampleRequest,
    SamplingParams,
    ServedElsewhere,
    StopReason,
    load_plugins,
)
from retrain.credit.logprob_gap import LogprobGap
from retrain.engines import TEACHERS, vllm
from retrain.engines.client import BadAnswerError
from retrain.engines.engine import create
from retrain.engines.given_tokens import GivenToken, ServerTeacher, open_server
from retrain.engines.sglang import SGLang
from retrain.engines.vllm import VLLM
from retrain.kernel.config.plugin_tables import TeacherTable
from tests.kit.inference_server import Fault, InferenceServer, changed, log_softmax, serving, truncated
from tests.kit.problems import codes_in
from tests.kit.toy_policy import STOP, ToyModel


def versions(groups: list[list[Sample]]) -> set[int]:
    return {sample.policy_version for group in groups for sample in group}


def written(policy, folder: Path) -> Path:
    """The policy after one more step, on a trainer's disk."""
    policy.train()
    folder.mkdir(parents=True)
    policy.save_adapter(folder)
    return folder


def test_samples_are_in_order_exact_and_reproducible_over_several_versions(
    make_engine, server, policy, requests, params
) -> None:
    engine = make_engine(server)
    assert isinstance(engine, ServedElsewhere)
    ((url, name),) = engine.addresses()
    assert url == f"{server.url}/v1"
    assert name in server.adapters
    for version in range(4):
        groups = engine.sample(requests, params)
        assert [len(group) for group in groups] == [4, 3, 1, 5]
        assert versions(groups) == {version}
        assert policy.gap(requests, groups) < 1e-9
        for sample in (sample for group in groups for sample in group):
            has_ended = int(sample.tokens_T[-1]) in STOP
            assert sample.stop_reason is (StopReason.EOS if has_ended else StopReason.LENGTH)
            assert has_ended or len(sample.tokens_T) == 12
        for a, b in zip(groups, engine.sample(requests, params), strict=True):
            assert all(np.array_equal(x.tokens_T, y.tokens_T) for x, y in zip(a, b, strict=True))
        policy.train()
        engine.publish()


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
    server.requests.clear()
    groups = engine.sample(requests, replace(params, greedy=True))
    assert {body["temperature"] for body in server.completions} == {0.0}
    assert all(len({tuple(sample.tokens_T) for sample in group}) == 1 for group in groups), "whatever the seed"
    engine = make_engine(server, prefix_caching=False)
    server.requests.clear()
    engine.sample(requests, params)
    salts = [body["cache_salt"] for body in server.completions]
    assert len(set(salts)) == len(salts) == 13


def test_samples_are_delivered_as_they_finish(make_engine, server, requests, params) -> None:
    engine = make_engine(server, max_concurrent=1)
    assert engine.delivers_early
    seen: list[tuple[int, int]] = []
    asked_at_delivery: list[int] = []
    server.requests.clear()

    def deliver(group: int, index: int, sample: Sample) -> None:
        seen.append((group, index))
        asked_at_delivery.append(len(server.completions))

    groups = engine.sample(requests, params, deliver)
    assert sorted(seen) == [(g, i) for g, group in enumerate(groups) for i in range(len(group))]
    assert asked_at_delivery[0] < len(seen)


def test_a_completion_never_outgrows_the_context(make_engine, server) -> None:
    engine = make_engine(server)
    stream = np.random.default_rng(3)
    full = SampleRequest(prompt_T=stream.integers(3, 500, size=636), seeds_G=(1,))
    (group,) = engine.sample([full], SamplingParams(max_tokens=50, temperature=0.7))
    assert len(group[0].tokens_T) <= 4
    over = SampleRequest(prompt_T=stream.integers(3, 500, size=640), seeds_G=(1,))
    with pytest.raises(ConfigError, match="context of 640 leaves no room"):
        engine.sample([over], SamplingParams(max_tokens=50, temperature=0.7))


def test_a_prompt_that_could_kill_a_server_is_not_sent(make_engine, server, params) -> None:
    engine = make_engine(server)
    server.requests.clear()
    for prompt in ([], [512], [-1], [3, 10**9]):
        with pytest.raises(BackendError, match="prompt 0"):
            engine.sample([SampleRequest(prompt_T=np.asarray(prompt, dtype=np.int64), seeds_G=(1,))], params)
    assert not server.requests


def test_only_with_staleness_the_next_version_may_be_on_its_way(make_engine, server, policy, requests, params) -> None:
    engine = make_engine(server)
    policy.train()
    with pytest.raises(BackendError, match="have policy version 0, and version 1 was published"):
        engine.sample(requests, params)
    engine._is_ahead = True
    assert versions(engine.sample(requests, params)) == {0}
    engine.publish()
    assert versions(engine.sample(requests, params)) == {1}


def test_trainer_mode_recomputes_and_keeps_the_engines_own_numbers(make_engine, server, policy, requests, params):
    engine = make_engine(server, logprobs="trainer", max_gap=1.0)
    server.always = changed(token_logprobs=lambda values: [value - 0.01 for value in values])
    groups = engine.sample(requests, params)
    assert policy.gap(requests, groups) < 1e-12
    for group in groups:
        for sample in group:
            assert sample.engine_logprobs_T is not None
            np.testing.assert_allclose(sample.logprobs_T - sample.engine_logprobs_T, 0.01, atol=1e-9)
    fields = engine.metrics()
    assert (fields["engine_gap_mean"], fields["engine_gap_max"]) == pytest.approx((0.01, 0.01))
    assert "engine_gap_mean" not in engine.metrics()
    policy.is_remote = True
    with pytest.raises(BackendError, match="not in this process"):
        engine.sample(requests, params)


def test_keys_and_values_of_the_weights_before_are_not_read_after_a_trainer_elsewhere_replaced_all(
    make_engine, server, policy, requests, params, tmp_path
) -> None:
    engine = make_engine(server)
    engine.load_weights(written(policy, tmp_path / "step_1"), policy.version)
    loading = [path for path, _ in server.requests if not path.startswith("/v1")]
    assert loading == ["/pause?mode=keep&clear_cache=false", "/update_weights", "/resume"]
    salts = set()
    for step in (2, 3):
        engine.sample(requests, params)  # fills the cache: one prompt is longer than three of its blocks
        engine.load_weights(written(policy, tmp_path / f"step_{step}"), policy.version)
        server.requests.clear()
        groups = engine.sample(requests, params)
        assert policy.gap(requests, groups) < 1e-9
        assert versions(groups) == {step}
        salts |= {body["cache_salt"] for body in server.completions}
    assert len(salts) == 2


def test_an_adapter_of_a_trainer_elsewhere_is_waited_for_and_stays_its_own(
    make_engine, server, policy, requests, params, tmp_path
) -> None:
    engine, there = make_engine(server), tmp_path / "step_1"
    hidden = written(policy, tmp_path / "on its way")
    threading.Timer(0.3, lambda: hidden.rename(there)).start()
    engine.load_adapter(there, policy.version)
    assert policy.gap(requests, engine.sample(requests, params)) < 1e-9
    engine.close()
    assert (there / "adapter_model.safetensors").exists()
    with pytest.raises(BackendError, match="step_9"):  # which never arrives
        make_engine(server, retry_s=0.1).load_adapter(tmp_path / "step_9", policy.version)


def test_servers_go_on_after_weights_that_could_not_be_read(make_engine, server, policy, tmp_path) -> None:
    engine = make_engine(server, retry_s=0.1)
    folder = written(policy, tmp_path / "step_1")
    shutil.rmtree(folder)
    with pytest.raises(BackendError, match="the weights of version 1"):
        engine.load_weights(folder, policy.version)
    engine.close()
    paths = [path for path, _ in server.requests if not path.startswith("/v1")]
    assert (paths[0], paths[-1]) == ("/pause?mode=keep&clear_cache=false", "/resume")


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


def test_a_key_goes_into_the_header_and_neither_it_nor_a_login_anywhere_else(
    make_engine, make_context, policy, monkeypatch, caplog
) -> None:
    with serving(ToyModel(), key="planted-secret-123") as server:
        with pytest.raises(ConfigError, match="TOY_SERVER_KEY is empty"):
            make_engine(server, api_key_env="TOY_SERVER_KEY")
        assert not server.requests
        monkeypatch.setenv("TOY_SERVER_KEY", "planted-secret-123")
        make_engine(server, api_key_env="TOY_SERVER_KEY")
        with pytest.raises(BackendError, match="api_key_env") as caught:
            make_engine(server)
    assert "planted-secret" not in caplog.text + str(caught.value)
    with pytest.raises(BackendError, match=r"http://127\.0\.0\.1:9") as caught:
        create(VLLM(), make_context(["http://user:planted-login@127.0.0.1:9"]), policy)
    assert "planted-login" not in str(caught.value)


# ---------------------------------------------------------------- a server as a teacher


Teaching = Callable[..., PluginContext]
TOKENS = [3, 14, 15, 9, 2, 6]


@pytest.fixture
def teaching(make_context: Callable[..., PluginContext]) -> Teaching:
    """A context whose teacher is at a URL, while nothing is at that of `[inference]`."""

    def make(*urls: str, **keys: Any) -> PluginContext:
        context = make_context(["http://127.0.0.1:9"], temperature=1.0, retry_s=2.0)
        table = TeacherTable(engine="vllm", url=",".join(urls), **keys)
        tables = {**context.config.tables, "teacher": table}
        return replace(context, config=replace(context.config, tables=tables))

    return make


@pytest.fixture
def teacher(server: InferenceServer, teaching: Teaching) -> Iterator[ServerTeacher]:
    opened = vllm.open_teacher(teaching(server.url))
    yield opened
    opened.close()


def rows(*lengths: int) -> list[LogprobRow]:
    stream = np.random.default_rng(0)
    return [LogprobRow.of(stream.integers(3, 500, size=4), stream.integers(3, 500, size=n)) for n in lengths]


def test_the_numbers_are_those_of_the_servers_model(teacher: ServerTeacher) -> None:
    asked, table = rows(1, 9, 30), ToyModel().table
    asked[1].action_T[6] = False  # a token of a tool
    for row, found_T in zip(asked, teacher.logprobs(asked, 1.0), strict=True):
        wanted_T = [0.0, *(log_softmax(table[a])[b] for a, b in zip(row.tokens_T, row.tokens_T[1:], strict=False))]
        np.testing.assert_allclose(found_T, np.where(row.action_T, wanted_T, 0.0), atol=1e-12)
    assert (teacher.logprobs([], 1.0), teacher.state()) == ([], {})
    with pytest.raises(BackendError) as caught:
        teacher.logprobs(asked, 0.7)
    assert codes_in(caught) == ["teacher.bad-temperature"]


def test_several_servers_share_the_rows_and_a_name_is_sent_as_it_is(
    server: InferenceServer, teaching: Teaching
) -> None:
    with serving(ToyModel()) as other:
        opened = open_server(VLLM(), teaching(server.url, other.url, model="toy"))
        opened.logprobs(rows(*[5] * 12), 1.0)
        opened.close()
        sent = [[body["model"] for body in each.completions] for each in (server, other)]
    assert min(map(len, sent)) > 1
    assert {name for names in sent for name in names} == {"toy"}


def test_another_tokenizer_or_an_unclear_model_is_refused(server: InferenceServer, teaching: Teaching) -> None:
    context = teaching(server.url)
    probe = context.tokenizer("A small town kept its records", add_special_tokens=False)["input_ids"]
    server.texts = {probe[3]: context.tokenizer.decode([probe[3]])}
    open_server(VLLM(), context).close()
    server.texts = {probe[3]: "another text"}
    with pytest.raises(ConfigError, match=r"has another tokenizer than .*\n.*'another text' there"):
        open_server(VLLM(), context)
    with serving(ToyModel(), model_name="second") as other, pytest.raises(ConfigError, match="'second', 'toy'"):
        open_server(VLLM(), teaching(server.url, other.url))


def saying(value: Any) -> Fault:
    def lying(handler: Any, answer: Any) -> None:
        for entry in answer["choices"][0]["prompt_logprobs"][1:]:
            next(iter(entry.values()))["logprob"] = value
        handler.reply(answer)

    return lying


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        *((fault, "") for fault in (truncated, changed(prompt_logprobs=None), changed(prompt_logprobs=[None]))),
        *(
            (saying(value), "is not a log-probability")
            for value in (0.5, float("nan"), -9999.0, float("-inf"), None, "-1.0", True)
        ),
    ],
)
def test_an_answer_without_the_numbers_is_never_one(
    teacher: ServerTeacher, server: InferenceServer, fault: Any, said: str
) -> None:
    server.always = fault
    with pytest.raises(BackendError, match=said or None) as caught:
        teacher.logprobs(rows(3), 1.0)
    assert "[inference]" not in str(caught.value.problems[0].fix)


def test_sglang_is_asked_in_its_own_way() -> None:
    path, body = SGLang().given_tokens(TOKENS, "any")
    assert (path, body["input_ids"], body["logprob_start_len"]) == ("/generate", TOKENS, 0) if body else False
    triples = [[None, 3, "a"], *([-0.5 * n, token, f"t{token}"] for n, token in enumerate(TOKENS[1:], 1))]
    given = SGLang().parse_given_tokens({"meta_info": {"input_token_logprobs": triples}}, TOKENS)
    assert given[0] == GivenToken(logprob=-0.5, text="t14")
    assert [entry.logprob for entry in given] == [-0.5, -1.0, -1.5, -2.0, -2.5]
    for answer in ({}, {"meta_info": {"input_token_logprobs": triples[1:]}}, {"meta_info": None}, []):
        with pytest.raises(BadAnswerError):
            SGLang().parse_given_tokens(answer, TOKENS)


def test_the_engines_that_teach() -> None:
    engines = load_plugins().registered(Kind.INFERENCE_ENGINE)
    teachers = {entry.spec.name for entry in engines if entry.spec.traits.open_teacher}
    assert teachers == {"pytorch", *TEACHERS} == {"pytorch", "vllm", "sglang"}


def test_experts_that_a_server_reports_belong_to_the_tokens_of_sample_and_prompt(
    make_engine, server, requests, params
) -> None:
    assert make_engine(server).sample(requests[:1], params)[0][0].experts_TLK is None
    server.layers = 3
    for request, group in zip(requests, make_engine(server).sample(requests, params), strict=True):
        for sample in group:
            # The pass that a token is drawn from reads the token before it.
            read_T = np.concatenate([request.prompt_T, sample.tokens_T[:-1]])
            assert sample.experts_TLK.shape == (len(sample.tokens_T), 3, 2)
            assert sample.context_experts_TLK.shape == (len(request.prompt_T), 3, 2)
            assert (sample.context_experts_TLK[0] == -1).all(), "no pass is before the first token"
            found_T = np.concatenate([sample.context_experts_TLK, sample.experts_TLK])[1:, 2, 0]
            assert found_T.tolist() == read_T.tolist()
    recomputing = make_engine(server, logprobs="trainer").sample(requests[:1], params)
    assert recomputing[0][0].experts_TLK is None, "the trainer chose its own"
