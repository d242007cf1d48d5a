"""The requests and answers of each kind of server, against recorded exchanges."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain import engines
from retrain.api import BackendError, ConfigError, PluginSpec
from retrain.engines.client import BadAnswerError
from retrain.engines.dialect import ROUNDING, CompletionRequest, RawCompletion, checked
from retrain.engines.max import MAX
from retrain.engines.max import create_engine as create_max
from retrain.engines.openai import OpenAI, TextIds
from retrain.engines.openai import create_engine as create_openai
from retrain.engines.sglang import SGLang
from retrain.engines.vllm import VLLM
from retrain.kernel.types import StopReason
from tests.kit.inference_server import changed, expert_file

MAX_FIELDS = {  # all that MAX 26.6 takes of what an engine here might send; it refuses any other
    *("model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"),
    *("presence_penalty", "frequency_penalty", "logprobs", "ignore_eos", "stop_token_ids", "cache_salt"),
}
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
MAX_ASKED = replace(ASKED, model="/models/tiny-llama", stop_ids=frozenset({2}))
# from MAX 26.6 on a CPU, for MAX_ASKED
MAX_ANSWER = json.loads("""
{"id":"ac2f23f286b3419798c0159dbdb10b29","choices":[{"finish_reason":"length","index":0,"logprobs":{"text_offset":null,
"token_logprobs":[-5.518315315246582,-6.620113372802734,-5.745879173278809],"tokens":null,"top_logprobs":[
{"X":-3.7537412643432617,"\ufffd":-3.8586041927337646," second":-3.9296162128448486," That":-4.176571846008301,
"ork":-4.193680286407471,"!":-5.518315315246582},{"\ufffd":-4.114429473876953,"sy":-3.402749538421631,
"ed":-3.797696113586426,"f":-3.7988343238830566," on":-6.620113372802734},{"blem":-3.2808644771575928,
" the":-3.7828786373138428," back":-3.8655598163604736,"Easy":-4.073287010192871,"e":-4.273758888244629,
"m":-5.745879173278809}]},"text":"! onm"}],"created":1795215484,"model":"/models/tiny-llama",
"object":"text_completion","system_fingerprint":null,"usage":{"completion_tokens":3,"prompt_tokens":4,"total_tokens":7}}
""")


def test_vllm_is_asked_by_ids_for_the_full_distribution_and_answers_with_ids() -> None:
    path, body = VLLM().completion(ASKED)
    assert path == "/v1/completions"
    assert body is not None
    wanted = {"prompt": [5, 6, 7, 8], "model": "/models/tiny", "return_token_ids": True, "ignore_eos": True}
    assert wanted.items() <= body.items()
    assert body["stop_token_ids"] == [0, 2]
    assert not {"n", "cache_salt"} & body.keys()
    _, adapted = VLLM().completion(replace(ASKED, adapter="a", cache_salt="s"))
    assert adapted is not None
    assert (adapted["model"], adapted["cache_salt"]) == ("a", "s")
    drawn = checked(VLLM().parse_completion(VLLM_ANSWER, replace(ASKED, top=1)), ASKED)
    assert drawn.tokens_T.tolist() == [344, 18, 296]
    assert drawn.logprobs_T[1] == -0.7133285999298096
    assert drawn.tops == {". ": -2.061527729034424, " ": -1.4587907791137695}


def test_vllm_adapters_are_never_loaded_in_place_and_no_base_models() -> None:
    assert VLLM().load_adapter("n", Path("/a/b")) == ("/v1/load_lora_adapter", {"lora_name": "n", "lora_path": "/a/b"})
    assert VLLM().unload_adapter("n") == ("/v1/unload_lora_adapter", {"lora_name": "n"})
    answer = {"data": [{"id": "m", "root": "/m", "parent": None, "max_model_len": 9}, {"id": "a", "parent": "m"}]}
    (served,) = VLLM().parse_models(answer)
    assert (served.name, served.root, served.context_limit) == ("m", "/m", 9)


def test_sglang_is_asked_by_ids_and_answers_with_ids_that_must_agree() -> None:
    path, body = SGLang().completion(replace(ASKED, adapter="a"))
    assert path == "/generate"
    assert body is not None
    assert {"input_ids": [5, 6, 7, 8], "return_logprob": True, "lora_path": "a"}.items() <= body.items()
    assert "lora_path" not in (SGLang().completion(ASKED)[1] or {})
    params = body["sampling_params"]
    assert (params["top_p"], params["top_k"], params["max_new_tokens"]) == (1.0, -1, 3)
    assert params["stop_token_ids"] == [0, 2]
    drawn = checked(SGLang().parse_completion(SGLANG_ANSWER, replace(ASKED, top=2)), ASKED)
    assert drawn.tokens_T.tolist() == [344, 18, 2]
    assert drawn.logprobs_T.tolist() == [-2.06, -0.71, -0.25]
    assert drawn.stop_reason == "eos"
    assert drawn.tops == {"token_id:223": -1.46, "token_id:344": -2.06}
    answer = deepcopy(SGLANG_ANSWER)
    answer["output_ids"][0] = 7
    with pytest.raises(BadAnswerError, match="differ"):
        SGLang().parse_completion(answer, ASKED)


@pytest.mark.parametrize("dialect", [VLLM(), SGLang(), OpenAI(TextIds(None)), MAX(TextIds(None))], ids=lambda d: d.name)
@pytest.mark.parametrize(
    "answer",
    [None, [], {}, "x", 3, {"choices": {}}, {"choices": [3]}, {"meta_info": 3}, {"choices": [{"logprobs": 3}]}],
)
def test_what_cannot_be_read_is_a_bad_answer(dialect: Any, answer: Any) -> None:
    with pytest.raises(BadAnswerError):
        checked(dialect.parse_completion(answer, replace(ASKED, top=1)), ASKED)
    with pytest.raises(BadAnswerError):
        dialect.parse_models(answer if isinstance(answer, dict) else {"data": answer or 3})


def test_max_is_sent_only_fields_that_it_knows_and_its_texts_give_the_ids(tokenizer: Any) -> None:
    dialect, asked = MAX(TextIds(tokenizer)), MAX_ASKED
    path, body = dialect.completion(replace(asked, cache_salt="s"))
    assert path == "/v1/completions"
    assert body is not None
    assert set(body) <= MAX_FIELDS
    assert (body["prompt"], body["logprobs"]) == ([5, 6, 7, 8], 1)  # 0 means none
    drawn = checked(dialect.parse_completion(MAX_ANSWER, asked), asked)
    assert [tokenizer.decode([token]) for token in drawn.tokens_T] == ["!", " on", "m"]
    assert drawn.logprobs_T.tolist() == [-5.518315315246582, -6.620113372802734, -5.745879173278809]
    assert drawn.stop_reason == "length"
    assert len(checked(dialect.parse_completion(MAX_ANSWER, replace(asked, top=5)), asked).tops) == 6  # and the sampled
    ended = deepcopy(MAX_ANSWER)
    choice = ended["choices"][0]
    choice["finish_reason"] = "stop"
    choice["logprobs"]["top_logprobs"][-1] = {"": choice["logprobs"]["token_logprobs"][-1]}  # it reads as nothing
    drawn = checked(dialect.parse_completion(ended, asked), asked)
    assert (drawn.tokens_T[-1], drawn.stop_reason) == (2, "eos")
    with pytest.raises(BadAnswerError, match="one of 2 end tokens, and does not report which"):
        dialect.parse_completion(ended, replace(asked, stop_ids=ASKED.stop_ids))
    (served,) = dialect.parse_models({"data": [{"id": "/models/tiny-llama", "max_model_len": 1024}, {"id": "adapter"}]})
    assert (served.name, served.context_limit) == ("/models/tiny-llama", 1024)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p["top_logprobs"][0].update({"1": -5.518315315246582}), "2 tokens have the log-probability"),
        (lambda p: p["top_logprobs"].__setitem__(0, {"1": -9.0}), "0 tokens have the log-probability"),
        (lambda p: p["top_logprobs"].__setitem__(0, {"\ufffd": -5.518315315246582}), "matches"),
        (lambda p: p["top_logprobs"].__setitem__(0, {"": -5.518315315246582}), "matches"),
        (lambda p: p["top_logprobs"].pop(), "holds no completion"),
        (lambda p: p.update(token_logprobs=None), "holds no log-probabilities"),
        (lambda p: p.update(top_logprobs=[]), "holds no log-probabilities"),
    ],
)
def test_a_token_that_max_does_not_name_exactly_is_refused(
    tokenizer: Any, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    answer = deepcopy(MAX_ANSWER)
    change(answer["choices"][0]["logprobs"])
    with pytest.raises(BadAnswerError, match=said):
        checked(MAX(TextIds(tokenizer)).parse_completion(answer, MAX_ASKED), MAX_ASKED)


def test_texts_name_tokens_exactly_or_not_at_all(tokenizer) -> None:
    text_ids = TextIds(tokenizer)
    shown = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    exact = [token for token, text in enumerate(shown) if shown.count(text) == 1]
    assert len(exact) > 200
    assert text_ids.ids([shown[token] for token in exact]) == exact
    assert text_ids.ids(["token_id:7", "token_id:300"]) == [7, 300]
    ambiguous = next(text for text in shown if shown.count(text) > 1)
    for bad, said in (
        (ambiguous, r"matches \d+ tokens"),
        ("no such token", "no token"),
        (3, "not the text of a token"),
    ):
        with pytest.raises(BadAnswerError, match=said):
            text_ids.ids([bad])


def test_the_openai_engine_works_with_exact_texts_only(make_engine, server, tokenizer, requests, params) -> None:
    server.always = changed(token_ids=None)
    engine = make_engine(server, dialect=OpenAI(TextIds(tokenizer)))
    server.requests.clear()
    assert [len(group) for group in engine.sample(requests, params)] == [4, 3, 1, 5]
    assert not {"top_k", "ignore_eos", "cache_salt", "min_p"} & set(server.completions[0])
    server.always = changed(token_ids=None, tokens=lambda texts: ["\ufffd" for _ in texts])
    with pytest.raises((ConfigError, BackendError), match="the server returns no token ids, and the text"):
        make_engine(server, dialect=OpenAI(TextIds(tokenizer)))


def test_what_a_server_cannot_do_is_refused(make_context, policy) -> None:
    with pytest.raises(ConfigError, match="prefix_caching"):
        create_openai(make_context(["http://127.0.0.1:9"], prefix_caching=False), policy)
    for dialect in (SGLang(), MAX(TextIds(None))):
        with pytest.raises(ConfigError, match="server cannot load full weights"):
            dialect.load_weights(Path("/w"))
    with pytest.raises(ConfigError, match=r'(?s)texts without log-probabilities.*start "max serve" and set'):
        create_max(make_context([]), policy)


def test_registered_engines_promise_no_repetition_of_a_seed() -> None:
    specs: list[PluginSpec] = []
    engines.retrain_register_inference_engines(specs.append)
    assert {"vllm", "sglang", "openai"} <= {spec.name for spec in specs}
    for spec in specs:
        assert callable(spec.load())
        assert spec.traits.determinism == "none"
        assert not spec.traits.provides_entropy


# ---------------------------------------------------------------- answers that are let through


SHORT = CompletionRequest(
    prompt_T=[5, 6],
    seed=1,
    max_tokens=4,
    temperature=0.7,
    model="m",
    adapter="",
    stop_ids=frozenset({0, 2}),
    vocabulary=10,
)
GOOD = RawCompletion(tokens=[3, 4, 0], logprobs=[-1.0, -0.5, -0.1], finish_reason="stop", prompt=[5, 6], model="m")


def test_a_good_answer() -> None:
    drawn = checked(GOOD, SHORT)
    assert drawn.tokens_T.tolist() == [3, 4, 0]
    assert drawn.tokens_T.dtype == np.int64
    assert drawn.logprobs_T.tolist() == [-1.0, -0.5, -0.1]
    assert drawn.stop_reason is StopReason.EOS
    asked = replace(SHORT, adapter="a")
    assert checked(replace(GOOD, model="a"), asked)
    with pytest.raises(BadAnswerError, match="'m' answered instead of 'a'"):
        checked(GOOD, asked)
    for reason in ("length", "stop"):  # the last token that was asked for is one that ends
        said = replace(GOOD, tokens=[3, 4, 5, 2], logprobs=[-1.0] * 4, finish_reason=reason)
        assert checked(said, SHORT).stop_reason is StopReason.EOS
    assert checked(replace(GOOD, logprobs=[1e-6, 0, -1]), SHORT).logprobs_T.tolist() == [0.0, 0.0, -1.0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": [3, 0, 4, 0], "logprobs": [-1.0] * 4}, "after an end-of-sequence token"),
        ({"tokens": [3, 4], "logprobs": [-1.0] * 2}, "stopped at token 4: it does not end a sequence"),
        ({"tokens": [3], "logprobs": [-1.0], "finish_reason": "length"}, "cut off after 1"),
        ({"finish_reason": "length"}, "finish reason 'length'"),
        ({"finish_reason": "content_filter"}, "finish reason 'content_filter'"),
        ({"prompt": [5]}, "another prompt"),
        ({"tokens": None}, "no token ids"),
        ({"logprobs": None}, "no log-probabilities"),
        ({"logprobs": [True, -1.0, -1.0]}, "True is not a log-probability"),
        ({"logprobs": [2 * ROUNDING, 0, -1]}, "is not a log-probability"),
        ({"experts": expert_file(np.arange(3), 2)}, "experts of shape .3, 2, 2. for 4 tokens"),
        ({"experts": "AAAA"}, "cannot be read"),
        ({"experts": 7}, "cannot be read"),
        ({"experts": base64.b64encode(b"\x93NUMPY\x01\x00\x10\x00{'descr': '|O', (").decode()}, "cannot be read"),
    ],
)
def test_what_is_wrong_is_said(changes, said) -> None:
    with pytest.raises(BadAnswerError, match=said):
        checked(replace(GOOD, **changes), SHORT)


anything = st.one_of(st.none(), st.booleans(), st.integers(-3, 12), st.floats(), st.text(max_size=2))


@given(
    tokens=st.lists(anything, max_size=6),
    logprobs=st.lists(anything, max_size=6),
    reason=st.sampled_from(["stop", "length", "abort", None, "eos"]),
)
def test_whatever_gets_through_is_sound(tokens, logprobs, reason) -> None:
    try:
        drawn = checked(replace(GOOD, tokens=tokens, logprobs=logprobs, finish_reason=reason), SHORT)
    except BadAnswerError:
        return
    assert 1 <= len(drawn.tokens_T) == len(drawn.logprobs_T) <= SHORT.max_tokens
    assert drawn.tokens_T.tolist() == tokens
    assert {type(token) for token in tokens} == {int}, "neither a fraction nor True is an id"
    assert not any(isinstance(value, bool | str) for value in logprobs)
    assert (drawn.tokens_T >= 0).all()
    assert (drawn.tokens_T < SHORT.vocabulary).all()
    assert np.isfinite(drawn.logprobs_T).all()
    assert (drawn.logprobs_T <= 0).all()
    ended = int(drawn.tokens_T[-1]) in SHORT.stop_ids
    assert (drawn.stop_reason is StopReason.EOS) == ended
    assert ended or len(drawn.tokens_T) == SHORT.max_tokens
