"""Engine `sglang`: SGLang's own `/generate` returns log-probabilities after temperature."""

from __future__ import annotations

from functools import partial
from typing import Any

from retrain.engines import dialect
from retrain.engines.client import BadAnswerError
from retrain.engines.engine import create
from retrain.engines.given_tokens import open_server


class SGLang(dialect.Dialect):
    """SGLang answers even to a wrong model name, so only the numbers can identify the model."""

    name = "sglang"
    product = "an SGLang"
    start_hint = "no --rl-on-policy-target and no SGLANG_RETURN_ORIGINAL_LOGPROB"
    adapter_hint = "--enable-lora --max-lora-rank RANK --lora-target-modules all"

    def completion(self, request: dialect.CompletionRequest) -> dialect.HttpRequest:
        params = {
            "max_new_tokens": request.max_tokens,
            "temperature": request.temperature,
            **dialect.FULL_DISTRIBUTION,
            "stop_token_ids": sorted(request.stop_ids),
            "skip_special_tokens": False,
        }
        body: dict[str, Any] = {"input_ids": request.prompt_T, "sampling_params": params, "return_logprob": True}
        body |= {"top_logprobs_num": request.top} if request.top else {}
        body |= {"extra_key": request.cache_salt} if request.cache_salt else {}
        return "/generate", body | ({"lora_path": request.adapter} if request.adapter else {})

    @dialect.refusing("the answer holds no completion")
    def parse_completion(self, answer: Any, request: dialect.CompletionRequest) -> dialect.RawCompletion:
        """The server reports the ids twice, and they must agree."""
        meta = answer["meta_info"]
        triples = meta.get("output_token_logprobs")
        finish = meta.get("finish_reason") or {}
        tokens = answer.get("output_ids")
        if triples is not None and tokens is not None and [triple[1] for triple in triples] != tokens:
            raise BadAnswerError("the ids of the completion and of its log-probabilities differ")
        tops = (meta.get("output_top_logprobs") or [None])[0] or []
        return dialect.RawCompletion(
            tokens=tokens,
            logprobs=None if triples is None else [triple[0] for triple in triples],
            finish_reason=finish.get("type"),
            tops={f"token_id:{top[1]}": float(top[0]) for top in tops} if request.top else None,
        )

    def given_tokens(self, tokens: list[int], model: str) -> dialect.HttpRequest:
        """The server has one model, whatever its name."""
        params = {"max_new_tokens": 0, "temperature": 1.0}
        body = {"input_ids": tokens, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
        return "/generate", body | {"return_text_in_logprobs": True}

    @dialect.refusing("the answer holds no log-probabilities of the given tokens")
    def parse_given_tokens(self, answer: Any, tokens: list[int]) -> list[dialect.GivenToken]:
        """The answer has triples of log-probability, id and text, the first without a log-probability."""
        triples = answer["meta_info"]["input_token_logprobs"]
        if [triple[1] for triple in triples] != tokens:
            raise BadAnswerError("the server read other tokens than it was sent")
        return [dialect.GivenToken(logprob=triple[0], text=triple[2]) for triple in triples[1:]]


create_engine, open_teacher = partial(create, SGLang()), partial(open_server, SGLang())
