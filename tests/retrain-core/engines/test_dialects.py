"""The requests and answers of each kind of server, against recorded exchanges."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain import engines
from retrain.api import BackendError, ConfigError, PluginSpec
from retrain.engines.client import BadAnswerError
from retrain.engines.dialect import CompletionRequest, checked
from retrain.engines.openai import OpenAI, TextIds
from retrain.engines.openai import create_engine as create_openai
from retrain.engines.sglang import SGLang
from retrain.engines.vllm import VLLM
from retrain.kernel.config.plugin_tables import InferenceTable
from tests.kit.inference_server import changed

ASKED = CompletionRequest(
    prompt_T=[5, 6, 7, 8],
    seed=2**62 + 5,
    max_tokens=3,
    temperature=0.7,
    model="/models/tiny",
    adapter="",
    stop_ids=frozenset({0, 2}),
    vocabulary=512,
)
# from vLLM 0.32 on a CPU, for ASKED, shortened only by what is not read
VLLM_ANSWER = json.loads("""
{"id":"cmpl-85eca43c0a263ca3","object":"text_completion","created":1795211021,"model":"/models/tiny","choices":[{
"index":0,"text":". 0 + ","logprobs":{"text_offset":[0,2,3],"token_logprobs":[-2.061527729034424,-0.7133285999298096,
-0.029454374685883522],"tokens":[". ","0"," + "],"top_logprobs":[{". ":-2.061527729034424," ":-1.4587907791137695},
{"0":-0.7133285999298096},{" + ":-0.029454374685883522}]},"finish_reason":"length","stop_reason":null,
"token_ids":[344,18,296],"prompt_logprobs":null,"prompt_token_ids":[5,6,7,8],"routed_experts":null}],
"usage":{"prompt_tokens":4,"total_tokens":7,"completion_tokens":3}}
""")
# /generate of SGLang as its documentation and sources have it
SGLANG_ANSWER = json.loads("""
{"text":". 0","output_ids":[344,18,2],"meta_info":{"id":"e5","finish_reason":{"type":"stop","matched":2},
"prompt_tokens":4,"completion_tokens":3,"weight_version":"default",
"output_token_logprobs":[[-2.06,344,null],[-0.71,18,null],[-0.25,2,null]],
"output_top_logprobs":[[[-1.46,223,null],[-2.06,344,null]],[[-0.71,18,null]],[[-0.25,2,null]]]}}
""")


def test_vllm_is_asked_for_the_full_distribution_and_exact_ids() -> None:
    path, body = VLLM().completion(ASKED)
    assert path == "/v1/completions"
    assert body is not None
    assert body["prompt"] == [5, 6, 7, 8]
    assert body["model"] == "/models/tiny"
    assert body["return_token_ids"] is True
    assert body["ignore_eos"] is True
    assert body["stop_token_ids"] == [0, 2]
    assert "n" not in body
    assert "cache_salt" not in body
    _, adapted = VLLM().completion(replace(ASKED, adapter="a", cache_salt="s"))
    assert adapted is not None
    assert (adapted["model"], adapted["cache_salt"]) == ("a", "s")


def test_vllm_answers_are_read() -> None:
    drawn = checked(VLLM().parse_completion(VLLM_ANSWER, replace(ASKED, top=1)), ASKED)
    assert drawn.tokens_T.tolist() == [344, 18, 296]
    assert drawn.logprobs_T[1] == -0.7133285999298096
    assert drawn.tops == {". ": -2.061527729034424, " ": -1.4587907791137695}


def test_vllm_adapters_are_never_loaded_in_place() -> None:
    assert VLLM().load_adapter("n", Path("/a/b")) == ("/v1/load_lora_adapter", {"lora_name": "n", "lora_path": "/a/b"})
    assert VLLM().unload_adapter("n") == ("/v1/unload_lora_adapter", {"lora_name": "n"})


def test_vllm_base_models_have_no_parent() -> None:
    answer = {"data": [{"id": "m", "root": "/m", "parent": None, "max_model_len": 9}, {"id": "a", "parent": "m"}]}
    (served,) = VLLM().parse_models(answer)
    assert (served.name, served.root, served.context_limit) == ("m", "/m", 9)


def test_sglang_is_asked_by_ids_and_for_log_probabilities() -> None:
    path, body = SGLang().completion(replace(ASKED, adapter="a"))
    assert path == "/generate"
    assert body is not None
    assert body["input_ids"] == [5, 6, 7, 8]
    assert body["return_logprob"] is True
    assert body["lora_path"] == "a"
    assert "lora_path" not in (SGLang().completion(ASKED)[1] or {})
    params = body["sampling_params"]
    assert (params["top_p"], params["top_k"], params["max_new_tokens"]) == (1.0, -1, 3)
    assert params["stop_token_ids"] == [0, 2]


def test_sglang_answers_are_read() -> None:
    drawn = checked(SGLang().parse_completion(SGLANG_ANSWER, replace(ASKED, top=2)), ASKED)
    assert drawn.tokens_T.tolist() == [344, 18, 2]
    assert drawn.logprobs_T.tolist() == [-2.06, -0.71, -0.25]
    assert drawn.stop_reason == "eos"
    assert drawn.tops == {"token_id:223": -1.46, "token_id:344": -2.06}


def test_sglang_ids_must_agree_with_those_of_the_log_probabilities() -> None:
    answer = json.loads(json.dumps(SGLANG_ANSWER))
    answer["output_ids"][0] = 7
    with pytest.raises(BadAnswerError, match="differ"):
        SGLang().parse_completion(answer, ASKED)


def test_sglang_takes_no_full_weights() -> None:
    with pytest.raises(ConfigError, match="an SGLang server cannot take full weights"):
        SGLang().load_weights(Path("/w"))


@pytest.mark.parametrize("dialect", [VLLM(), SGLang(), OpenAI(TextIds(None))], ids=lambda d: d.name)
@pytest.mark.parametrize(
    "answer",
    [None, [], {}, "x", 3, {"choices": {}}, {"choices": [3]}, {"meta_info": 3}, {"choices": [{"logprobs": 3}]}],
)
def test_what_cannot_be_read_is_a_bad_answer(dialect: Any, answer: Any) -> None:
    with pytest.raises(BadAnswerError):
        checked(dialect.parse_completion(answer, replace(ASKED, top=1)), ASKED)
    with pytest.raises(BadAnswerError):
        dialect.parse_models(answer if isinstance(answer, dict) else {"data": answer or 3})


def test_texts_name_tokens_exactly_or_not_at_all(tokenizer) -> None:
    text_ids = TextIds(tokenizer)
    shown = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    exact = [token for token, text in enumerate(shown) if shown.count(text) == 1]
    assert len(exact) > 200
    assert text_ids.ids([shown[token] for token in exact]) == exact
    assert text_ids.ids(["token_id:7", "token_id:300"]) == [7, 300]
    ambiguous = next(text for text in shown if shown.count(text) > 1)
    with pytest.raises(BadAnswerError, match=r"matches \d+ tokens"):
        text_ids.ids([ambiguous])
    with pytest.raises(BadAnswerError, match="matches no token"):
        text_ids.ids(["no such token"])
    with pytest.raises(BadAnswerError, match="is not the text of a token"):
        text_ids.ids([3])


def test_the_openai_engine_works_with_texts_that_hold_ids(make_engine, server, tokenizer, requests, params) -> None:
    server.always = changed(token_ids=None)
    engine = make_engine(server, dialect=OpenAI(TextIds(tokenizer)))
    server.requests.clear()
    assert [len(group) for group in engine.sample(requests, params)] == [4, 3, 1, 5]
    assert not {"top_k", "ignore_eos", "cache_salt", "min_p"} & set(server.completions[0])


def test_the_openai_engine_refuses_texts_that_are_not_exact(make_engine, server, tokenizer) -> None:
    server.always = changed(token_ids=None, tokens=lambda texts: ["\ufffd" for _ in texts])
    with pytest.raises((ConfigError, BackendError)) as caught:
        make_engine(server, dialect=OpenAI(TextIds(tokenizer)))
    assert "the server returns no token ids, and the text" in str(caught.value)


def test_a_switch_that_openais_requests_do_not_have_is_refused(make_context, policy) -> None:
    with pytest.raises(ConfigError, match="prefix_caching"):
        create_openai(make_context(["http://127.0.0.1:9"], prefix_caching=False), policy)


def test_registered_engines_promise_no_repetition_of_a_seed() -> None:
    specs: list[PluginSpec] = []
    engines.retrain_register_inference_engines(specs.append)
    assert {"vllm", "sglang", "openai"} <= {spec.name for spec in specs}
    for spec in specs:
        assert callable(spec.load())
        assert spec.traits.determinism == "none"
        assert not spec.traits.provides_entropy


@pytest.mark.parametrize("url", ["", "http://a", "https://a:1/base, http://user:pass@b:2", "http://a,http://b,"])
def test_urls_that_can_be_meant(url) -> None:
    assert InferenceTable(url=url).url == url


@pytest.mark.parametrize(
    "url",
    [
        "a",
        "localhost:8000",
        "ftp://a",
        "http://",
        "http://a b",
        "http://a?x=1",
        "http:/a",
        "http://a:99999",
        "http://[a",
    ],
)
def test_urls_that_cannot_be_meant(url) -> None:
    with pytest.raises(ValueError, match="is not a URL such as"):
        InferenceTable(url=url)


def test_a_login_in_a_bad_url_is_not_shown() -> None:
    with pytest.raises(ValueError, match="is not a URL") as caught:
        InferenceTable(url="ftp://user:planted-login@host")
    assert "planted-login" not in str(caught.value).split("input_value")[0]


def test_numbers_of_several_servers_are_kept_apart(make_engine, server) -> None:
    engine = make_engine(server)
    adapters = engine._adapters
    gaps = adapters.comparison.with_trainer(engine._caller.servers, adapters.current, [np.arange(3, 30)])
    assert list(gaps) == list(engine._caller.servers)
