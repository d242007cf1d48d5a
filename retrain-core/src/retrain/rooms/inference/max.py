"""Engine `max`: `max serve` of Modular's MAX, which takes token ids and tells what it drew in texts alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.serving import Policy
from retrain.kernel.errors import ConfigError, Problem
from retrain.rooms.inference.answers import Asked, Said
from retrain.rooms.inference.client import BadAnswerError
from retrain.rooms.inference.dialect import Request, Served
from retrain.rooms.inference.engine import ServerEngine, create
from retrain.rooms.inference.table import InferenceTable
from retrain.rooms.inference.text_ids import TextIds
from retrain.rooms.inference.vllm import VLLM

UNKNOWN = ("return_token_ids",)  # a field that MAX does not know is refused with 400


def create_engine(context: PluginContext, policy: Policy) -> ServerEngine:
    """The engine for this policy; ConfigError without a URL, because MAX in this process shows no log-probabilities."""
    if not context.config.table("inference", InferenceTable).url:
        what = "MAX cannot sample in this process: what it offers there returns texts without log-probabilities"
        fix = 'start "max serve" and set [inference] url to it (http://127.0.0.1:8000 by default)'
        raise ConfigError(Problem(where=context.config.place("inference.url"), what=what, fix=fix))
    return create(MAX(TextIds(context.tokenizer)), context, policy)


class MAX(VLLM):
    """The words of MAX, 26.6; adapters are loaded the way vLLM does it, and only on a GPU.

    The log-probabilities of a token are keyed by its text, without special tokens: the token that ends a completion
    reads "". Where a text does not name one token, the answer is refused.
    """

    name = "max"
    start_hint = "a version that gives log-probabilities after temperature (26.6 has no option for it)"
    adapter_hint = (
        "--enable-lora --max-lora-rank RANK --no-enable-prefix-caching --prefer-module-v3 "
        "--no-enable-overlap-scheduler, on a GPU"
    )

    def __init__(self, text_ids: TextIds) -> None:
        self._text_ids = text_ids

    def served(self, answer: Any) -> list[Served]:
        """See `Dialect.served`; adapters stand in the same list, behind the model."""
        return super().served(answer)[:1]

    def completion(self, asked: Asked) -> Request:
        """See `Dialect.completion`."""
        path, body = super().completion(asked)
        kept = {name: value for name, value in (body or {}).items() if name not in UNKNOWN}
        return path, kept | {"logprobs": max(1, asked.top)}

    def said(self, answer: Any, asked: Asked) -> Said:
        """See `Dialect.said`."""
        try:
            choice = answer["choices"][0]
            logprobs = choice.get("logprobs") or {}
            values, tops = logprobs.get("token_logprobs"), logprobs.get("top_logprobs")
            reason = choice.get("finish_reason")
            if not values or not tops:
                raise BadAnswerError("the answer holds no log-probabilities")
            texts = [_drawn(value, top) for value, top in zip(values, tops, strict=True)]
            return Said(
                tokens=self._ids(texts, asked, is_ended=reason == "stop"),
                logprobs=values,
                finish_reason=reason,
                model=answer.get("model"),
                tops=dict(tops[0]) if asked.top else None,
            )
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            raise BadAnswerError("the answer holds no completion") from None

    def load_weights(self, folder: Path) -> list[Request]:
        """See `Dialect.load_weights`."""
        what = "full weights cannot be sent to a MAX server"
        fix = 'use engine = "vllm", or train an adapter'
        raise ConfigError(Problem(where="[inference] engine", what=what, fix=fix))

    def _ids(self, texts: list[str], asked: Asked, *, is_ended: bool) -> list[int]:
        if not is_ended or texts[-1] != "":
            return self._text_ids.ids(texts)
        if len(asked.stop_ids) != 1:
            raise BadAnswerError(f"it ended with one of {len(asked.stop_ids)} end tokens, and does not say which")
        return [*self._text_ids.ids(texts[:-1]), *asked.stop_ids]


def _drawn(value: float, top: dict[str, float]) -> str:
    """The text of the token that was drawn: that with its log-probability."""
    found = [text for text, other in top.items() if other == value]
    if len(found) != 1:
        raise BadAnswerError(f"{len(found)} tokens have the log-probability of the one that was drawn")
    return found[0]
