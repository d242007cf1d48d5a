"""MAX's requests and answers: ids sent, and ids recovered from the texts of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from retrain.api import ConfigError
from retrain.engines.client import BadAnswerError
from retrain.engines.dialect import CompletionRequest, checked
from retrain.engines.max import MAX, create_engine
from retrain.engines.openai import TextIds
from tests.kit.toy_policy import ToyPolicy

FIELDS = {  # all that MAX 26.6 takes of what an engine here might send; it refuses any other
    *("model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"),
    *("presence_penalty", "frequency_penalty", "logprobs", "ignore_eos", "stop_token_ids", "cache_salt"),
}


@pytest.fixture
def asked(tokenizer: Any) -> CompletionRequest:
    return CompletionRequest(
        prompt_T=[5, 6, 7, 8],
        seed=2**62 + 5,
        max_tokens=3,
        temperature=0.7,
        model="/models/tiny-llama",
        adapter="",
        stop_ids=frozenset({2}),
        vocabulary=512,
    )


@pytest.fixture
def dialect(tokenizer: Any) -> MAX:
    return MAX(TextIds(tokenizer))


# from MAX 26.6 on a CPU, for the prompt below
ANSWER = json.loads("""
{"id":"ac2f23f286b3419798c0159dbdb10b29","choices":[{"finish_reason":"length","index":0,"logprobs":{"text_offset":null,
"token_logprobs":[-5.518315315246582,-6.620113372802734,-5.745879173278809],"tokens":null,"top_logprobs":[
{"X":-3.7537412643432617,"\ufffd":-3.8586041927337646," second":-3.9296162128448486," That":-4.176571846008301,
"ork":-4.193680286407471,"!":-5.518315315246582},{"\ufffd":-4.114429473876953,"sy":-3.402749538421631,
"ed":-3.797696113586426,"f":-3.7988343238830566," on":-6.620113372802734},{"blem":-3.2808644771575928,
" the":-3.7828786373138428," back":-3.8655598163604736,"Easy":-4.073287010192871,"e":-4.273758888244629,
"m":-5.745879173278809}]},"text":"! onm"}],"created":1795215484,"model":"/models/tiny-llama",
"object":"text_completion","system_fingerprint":null,"usage":{"completion_tokens":3,"prompt_tokens":4,"total_tokens":7}}
""")


@pytest.fixture
def answer() -> dict[str, Any]:
    return deepcopy(ANSWER)


def test_only_fields_that_it_knows_are_sent(dialect: MAX, asked: CompletionRequest) -> None:
    path, body = dialect.completion(replace(asked, cache_salt="s"))
    assert path == "/v1/completions"
    assert body is not None
    assert set(body) <= FIELDS
    assert body["prompt"] == [5, 6, 7, 8]
    assert body["logprobs"] == 1  # 0 means none
    assert "n" not in body
    assert "echo" not in body


def test_the_drawn_token_is_the_text_with_its_log_probability(
    dialect: MAX, asked: CompletionRequest, answer: Any, tokenizer: Any
) -> None:
    drawn = checked(dialect.parse_completion(answer, asked), asked)
    assert [tokenizer.decode([token]) for token in drawn.tokens_T] == ["!", " on", "m"]
    assert drawn.logprobs_T.tolist() == [-5.518315315246582, -6.620113372802734, -5.745879173278809]
    assert drawn.stop_reason == "length"
    assert (
        len(checked(dialect.parse_completion(answer, replace(asked, top=5)), asked).tops) == 6
    )  # with the sampled one


def test_the_end_token_reads_as_nothing(dialect: MAX, asked: CompletionRequest, answer: Any) -> None:
    choice = answer["choices"][0]
    choice["finish_reason"] = "stop"
    choice["logprobs"]["top_logprobs"][-1] = {"": choice["logprobs"]["token_logprobs"][-1]}
    drawn = checked(dialect.parse_completion(answer, asked), asked)
    assert drawn.tokens_T[-1] == 2
    assert drawn.stop_reason == "eos"
    with pytest.raises(BadAnswerError, match="one of 2 end tokens, and does not report which"):
        dialect.parse_completion(answer, replace(asked, stop_ids=frozenset({0, 2})))


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
def test_what_is_not_exact_is_refused(
    dialect: MAX, asked: CompletionRequest, answer: Any, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    change(answer["choices"][0]["logprobs"])
    with pytest.raises(BadAnswerError, match=said):
        checked(dialect.parse_completion(answer, asked), asked)


@pytest.mark.parametrize("answer", [None, [], {}, 3, {"choices": []}, {"choices": [3]}, {"choices": [{}]}])
def test_what_cannot_be_read_is_a_bad_answer(dialect: MAX, asked: CompletionRequest, answer: Any) -> None:
    with pytest.raises(BadAnswerError):
        checked(dialect.parse_completion(answer, asked), asked)


def test_adapters_in_the_list_of_models_are_no_base_models(dialect: MAX) -> None:
    (served,) = dialect.parse_models({"data": [{"id": "/models/tiny-llama", "max_model_len": 1024}, {"id": "adapter"}]})
    assert (served.name, served.context_limit) == ("/models/tiny-llama", 1024)


def test_without_a_url_it_says_what_to_start(make_context: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        create_engine(make_context([]), ToyPolicy())
    assert "texts without log-probabilities" in str(caught.value)
    assert 'start "max serve" and set [inference] url' in str(caught.value)


def test_full_weights_are_refused(dialect: MAX) -> None:
    with pytest.raises(ConfigError, match="server cannot take full weights"):
        dialect.load_weights(Path("/weights"))
