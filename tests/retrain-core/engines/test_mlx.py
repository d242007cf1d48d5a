"""MLX-LM's requests and answers, against a recorded exchange; `tests/end_to_end/test_mlx_server.py` has the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from retrain.api import BackendError, ConfigError
from retrain.engines.client import BadAnswerError
from retrain.engines.dialect import CompletionRequest, checked
from retrain.engines.mlx import MLX

MODEL = "/models/tiny"
# from MLX-LM 0.32.2 on a CPU
ANSWER = json.loads("""
{"id": "cmpl-3a7d390a-24a5-4493-be8e-fc8b28870322", "system_fingerprint": "0.32.2-0.32.4-Linux-x86_64",
"object": "text_completion", "model": "/models/tiny", "created": 1795213800, "choices": [{"index": 0,
"finish_reason": "length", "logprobs": {"content": [{"id": 16, "logprob": -2.1875}, {"id": 26, "logprob": -4.28125},
{"id": 299, "logprob": -0.4375}, {"id": 26, "logprob": -0.125}]}, "text": ".8: 8"}], "usage": {"prompt_tokens": 5,
"completion_tokens": 4, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}}
""")
# and with `top_logprobs`: the first token drawn was "2", and the id is that of "."
TOPS_ANSWER = json.loads("""
{"model": "/models/tiny", "choices": [{"index": 0, "finish_reason": "length", "logprobs": {"content": [{"id": 16,
"token": ".", "logprob": -2.1875, "top_logprobs": [{"id": 16, "token": ".", "logprob": -2.1875}, {"id": 21,
"token": "3", "logprob": -1.3125}]}]}, "text": "2"}], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}
""")


@pytest.fixture
def asked(tokenizer: Any) -> CompletionRequest:
    return CompletionRequest(
        prompt_T=tokenizer("12 + 3 =")["input_ids"],
        seed=5,
        max_tokens=4,
        temperature=0.7,
        model=MODEL,
        adapter="",
        stop_ids=frozenset({0, 2}),
        vocabulary=512,
    )


@pytest.fixture
def dialect(tokenizer: Any) -> MLX:
    return MLX(tokenizer, MODEL)


def body_of(dialect: MLX, asked: CompletionRequest) -> dict[str, Any]:
    path, body = dialect.completion(asked)
    assert path == "/v1/completions"
    assert body is not None
    return dict(body)


def with_content(*entries: tuple[int, float], reason: str) -> dict[str, Any]:
    answer = deepcopy(ANSWER)
    choice = answer["choices"][0]
    choice["logprobs"]["content"] = [{"id": token, "logprob": value} for token, value in entries]
    choice["finish_reason"] = reason
    return answer


def test_a_request_names_the_model_and_overrules_the_servers_defaults(dialect: MLX, asked: CompletionRequest) -> None:
    body = body_of(dialect, asked)
    assert body["model"] == MODEL  # "default_model" ignores adapters
    assert body["adapters"] is None
    assert body["draft_model"] is None
    assert body["prompt"] == "12 + 3 ="
    assert body["logprobs"] is True
    assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1.0, 0, 0.0, 0.0)
    assert not {"seed", "n", "top_logprobs", "logit_bias"} & body.keys()


def test_answers_are_read(dialect: MLX, asked: CompletionRequest) -> None:
    drawn = checked(dialect.parse_completion(ANSWER, asked), asked)
    assert drawn.tokens_T.tolist() == [16, 26, 299, 26]
    assert drawn.logprobs_T.tolist() == [-2.1875, -4.28125, -0.4375, -0.125]
    assert drawn.stop_reason == "length"


def test_alternatives_are_asked_for_without_an_end_and_read_alone(dialect: MLX, asked: CompletionRequest) -> None:
    question = replace(asked, top=5, max_tokens=1)
    body = body_of(dialect, question)
    assert body["top_logprobs"] == 5
    assert set(body["logit_bias"]) == {"0", "2"}
    assert max(body["logit_bias"].values()) < -1e6
    assert checked(dialect.parse_completion(TOPS_ANSWER, question), question).tops == {
        "token_id:16": -2.1875,
        "token_id:21": -1.3125,
    }


def test_what_the_server_drew_beyond_an_end_of_ours_is_dropped(dialect: MLX, asked: CompletionRequest) -> None:
    answer = with_content((16, -1.0), (2, -0.5), (7, -0.1), (8, -0.2), reason="length")
    drawn = checked(dialect.parse_completion(answer, asked), asked)
    assert drawn.tokens_T.tolist() == [16, 2]
    assert drawn.logprobs_T.tolist() == [-1.0, -0.5]
    assert drawn.stop_reason == "eos"


def test_an_end_that_is_none_of_ours_is_refused(dialect: MLX, asked: CompletionRequest) -> None:
    with pytest.raises(BadAnswerError, match="does not end a sequence"):
        checked(dialect.parse_completion(with_content((16, -1.0), (9, -0.5), reason="stop"), asked), asked)


def test_a_tool_call_is_an_end_like_any_other(dialect: MLX, asked: CompletionRequest) -> None:
    answer = with_content((16, -1.0), (2, -0.5), reason="tool_calls")
    assert checked(dialect.parse_completion(answer, asked), asked).stop_reason == "eos"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a["usage"].update(prompt_tokens=6), "read a prompt of 6 tokens, and 5 were sent"),
        (lambda a: a.update(model="default_model"), "'default_model' answered"),
        (lambda a: a["choices"][0].pop("logprobs"), "holds no token ids"),
        (lambda a: a["choices"][0].update(logprobs=None), "holds no token ids"),
        (lambda a: a["choices"][0].update(logprobs={"content": []}), "holds no token"),
        (lambda a: a["choices"][0].update(logprobs={"content": [{"id": 3}]}), "holds no completion"),
        (lambda a: a["choices"][0]["logprobs"]["content"][0].update(id="16"), "is not the id of"),
        (lambda a: a["choices"][0]["logprobs"]["content"][0].update(logprob=float("nan")), "is not a log-probability"),
        (lambda a: a.pop("usage"), "holds no completion"),
        (lambda a: a.pop("choices"), "holds no completion"),
    ],
)
def test_what_cannot_be_used_is_a_bad_answer(
    dialect: MLX, asked: CompletionRequest, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    answer = deepcopy(ANSWER)
    change(answer)
    with pytest.raises(BadAnswerError, match=said):
        checked(dialect.parse_completion(answer, asked), asked)


@pytest.mark.parametrize("answer", [None, [], {}, {"status": "unavailable"}, "ok"])
def test_only_its_own_health_check_is_taken_for_the_server(dialect: MLX, answer: Any) -> None:
    with pytest.raises(BadAnswerError, match="not the server of MLX-LM"):
        dialect.parse_models(answer)


def test_the_model_it_serves_is_the_one_that_is_asked_for(dialect: MLX) -> None:
    assert [model.name for model in dialect.parse_models({"status": "ok"})] == [MODEL]


def test_prompts_are_texts_that_encode_to_themselves(dialect: MLX, asked: CompletionRequest, tokenizer: Any) -> None:
    byte = next(token for token in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([token]))
    apart = [tokenizer(text)["input_ids"][0] for text in "the"]
    assert tokenizer(tokenizer.decode(apart))["input_ids"] != apart
    for prompt_T in ([byte], apart, [*asked.prompt_T, byte]):
        with pytest.raises(BackendError, match="encodes to other tokens"):
            dialect.completion(replace(asked, prompt_T=prompt_T))


class BeginsTexts:
    """A tokenizer that prepends token 1 to each text, as Llama's does."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [1, *self._tokenizer(text)["input_ids"]]}

    def decode(self, ids: list[int], **options: Any) -> str:
        return str(self._tokenizer.decode(ids, **options))


def test_a_token_that_the_tokenizer_puts_first_is_not_sent_twice(asked: CompletionRequest, tokenizer: Any) -> None:
    dialect = MLX(BeginsTexts(tokenizer), MODEL)
    begun = replace(asked, prompt_T=[1, *asked.prompt_T])
    assert body_of(dialect, begun)["prompt"] == "12 + 3 ="
    with pytest.raises(BackendError, match="encodes to other tokens"):
        dialect.completion(asked)  # it could not be had without


def test_full_weights_are_refused(dialect: MLX) -> None:
    with pytest.raises(ConfigError, match="server cannot take full weights"):
        dialect.load_weights(Path("/weights"))


@pytest.fixture
def peft_folder(tmp_path: Path) -> Path:
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{name}.lora_A.weight": np.ones((2, 6), np.float32),
        f"{name}.lora_B.weight": np.ones((8, 2), np.float32),
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4}))
    return tmp_path


def test_every_version_has_a_path_of_its_own_that_goes_with_it(
    dialect: MLX, asked: CompletionRequest, peft_folder: Path
) -> None:
    folder = peft_folder
    path, body = dialect.load_adapter("retrain-v1", folder)
    assert path == "/v1/completions"
    assert body is not None
    converted = Path(body["adapters"])
    assert (converted / "adapters.safetensors").is_file()
    assert converted.is_relative_to(folder)
    assert dialect.load_adapter("retrain-v1", folder) == (path, body)  # after a server was started again
    assert body_of(dialect, replace(asked, adapter="retrain-v1"))["adapters"] == str(converted)
    dialect.unload_adapter("retrain-v1")
    assert not converted.exists()
    assert dialect.unload_adapter("retrain-v1") == ("/health", None)
