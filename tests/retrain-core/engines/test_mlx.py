"""MLX-LM's requests, recorded answers, and adapters converted for it; `end_to_end/test_mlx_server.py` has the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

from retrain.api import BackendError, ConfigError
from retrain.engines.client import BadAnswerError
from retrain.engines.dialect import CompletionRequest, checked
from retrain.engines.mlx import MLX, convert

MODEL, WEIGHTS = "/models/tiny", "adapter_model.safetensors"
CONFIG = {"r": 4, "lora_alpha": 6, "bias": "none", "use_dora": False, "use_rslora": False, "fan_in_fan_out": False}
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


def test_answers_are_read_up_to_an_end_of_ours(dialect: MLX, asked: CompletionRequest) -> None:
    drawn = checked(dialect.parse_completion(ANSWER, asked), asked)
    assert drawn.tokens_T.tolist() == [16, 26, 299, 26]
    assert drawn.logprobs_T.tolist() == [-2.1875, -4.28125, -0.4375, -0.125]
    assert drawn.stop_reason == "length"
    answer = with_content((16, -1.0), (2, -0.5), (7, -0.1), (8, -0.2), reason="length")
    drawn = checked(dialect.parse_completion(answer, asked), asked)
    assert (drawn.tokens_T.tolist(), drawn.logprobs_T.tolist()) == ([16, 2], [-1.0, -0.5])
    assert drawn.stop_reason == "eos"
    answer = with_content((16, -1.0), (2, -0.5), reason="tool_calls")
    assert checked(dialect.parse_completion(answer, asked), asked).stop_reason == "eos"
    with pytest.raises(BadAnswerError, match="does not end a sequence"):
        checked(dialect.parse_completion(with_content((16, -1.0), (9, -0.5), reason="stop"), asked), asked)


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


def test_only_its_own_health_check_is_taken_for_the_server_and_full_weights_are_refused(dialect: MLX) -> None:
    for answer in (None, [], {}, {"status": "unavailable"}, "ok"):
        with pytest.raises(BadAnswerError, match="not the server of MLX-LM"):
            dialect.parse_models(answer)
    assert [model.name for model in dialect.parse_models({"status": "ok"})] == [MODEL]
    with pytest.raises(ConfigError, match="server cannot load full weights"):
        dialect.load_weights(Path("/weights"))


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


@pytest.fixture
def write_peft(tmp_path: Path) -> Callable[..., Path]:
    def write(**config: Any) -> Path:
        folder = tmp_path / "peft"
        folder.mkdir()
        stream = np.random.default_rng(0)
        tensors = {}
        for layer in (0, 1):
            for module, (out, width) in {"self_attn.q_proj": (8, 6), "mlp.down_proj": (6, 10)}.items():
                name = f"base_model.model.model.layers.{layer}.{module}"
                tensors[f"{name}.lora_A.weight"] = stream.normal(size=(4, width)).astype(np.float32)
                tensors[f"{name}.lora_B.weight"] = stream.normal(size=(out, 4)).astype(np.float32)
        save_file(tensors, folder / WEIGHTS)
        (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
        return folder

    return write


def test_every_version_has_a_path_of_its_own_that_goes_with_it(
    dialect: MLX, asked: CompletionRequest, write_peft: Callable[..., Path]
) -> None:
    folder = write_peft()
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


@pytest.mark.parametrize(("rslora", "scale"), [(False, 6 / 4), (True, 3.0)])
def test_an_adapter_keeps_its_product_and_scale(
    write_peft: Callable[..., Path], tmp_path: Path, rslora: bool, scale: float
) -> None:
    source = write_peft(use_rslora=rslora)
    convert(source, tmp_path / "mlx")
    theirs, ours = load_file(source / WEIGHTS), load_file(tmp_path / "mlx" / "adapters.safetensors")
    assert len(ours) == len(theirs) == 8
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        a, b = theirs[f"base_model.model.{name}.lora_A.weight"], theirs[f"base_model.model.{name}.lora_B.weight"]
        np.testing.assert_array_equal((ours[f"{name}.lora_a"] @ ours[f"{name}.lora_b"]).T, b @ a)
    config = json.loads((tmp_path / "mlx" / "adapter_config.json").read_text())
    keys = ["mlp.down_proj", "self_attn.q_proj"]
    assert config["lora_parameters"].items() >= {"scale": scale, "rank": 4, "keys": keys}.items()
    assert config["num_layers"] == -1


def test_bfloat16_is_read_exactly(write_peft: Callable[..., Path], tmp_path: Path) -> None:
    source = write_peft()
    tensor = torch.randn(4, 6).bfloat16()
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.lora_A.weight": tensor, f"{name}.lora_B.weight": torch.randn(8, 4).bfloat16()}
    save_torch(tensors, source / WEIGHTS)
    convert(source, tmp_path / "mlx")
    found = load_file(tmp_path / "mlx" / "adapters.safetensors")["model.layers.0.self_attn.q_proj.lora_a"]
    np.testing.assert_array_equal(found, tensor.float().numpy().T)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_dora": True}, "use_dora = True"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": None}, "cannot be converted for MLX"),
        ({"r": 0}, "cannot be converted for MLX"),
    ],
)
def test_what_mlx_cannot_express_is_refused(
    write_peft: Callable[..., Path], tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(BackendError, match=said):
        convert(write_peft(**config), tmp_path / "mlx")
    assert not (tmp_path / "mlx").exists()


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff" * 64, b"[]"])
def test_unreadable_adapters_are_one_error(
    write_peft: Callable[..., Path], tmp_path: Path, file: str, content: bytes | None
) -> None:
    source = write_peft()
    (source / file).unlink()
    if content is not None:
        (source / file).write_bytes(content)
    with pytest.raises(BackendError, match="cannot be converted for MLX"):
        convert(source, tmp_path / "mlx")
    save_file({"base_model.model.lm_head.modules_to_save.weight": np.zeros((2, 2), np.float32)}, source / WEIGHTS)
    (source / "adapter_config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(BackendError, match="MLX-LM does not support"):
        convert(source, tmp_path / "mlx")
