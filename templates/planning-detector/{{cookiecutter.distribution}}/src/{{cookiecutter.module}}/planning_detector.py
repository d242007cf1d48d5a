"""Planning detector `{{ cookiecutter.name }}`: marks questions and sentences that announce a next step."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from retrain.api import Mask, PluginContext, {% if cookiecutter.form == "file" %}PluginSpec, {% endif %}Tokens

OPENINGS = ("let's", "let us", "first", "next", "then", "now", "wait", "alternatively", "i need to", "we need to")
SENTENCE = re.compile(r"[^.!?\n]+[.!?\n]?")


class Params(BaseModel):
    """`[planning.params]`: the phrases that open a planning sentence."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    openings: tuple[str, ...] = Field(default=OPENINGS, min_length=1)


class QuestionDetector:
    """Marks every token that overlaps a planning sentence. `decode` returns the text of one token id."""

    def __init__(self, decode: Callable[[int], str], openings: Sequence[str] = OPENINGS) -> None:
        self._plans = re.compile(rf"\s*(?:{'|'.join(map(re.escape, openings))})\b", flags=re.IGNORECASE)
        self._decode = decode
        self._texts: dict[int, str] = {}  # far fewer distinct ids than tokens

    def masks(self, completions_G: Sequence[Tokens]) -> list[Mask]:
        """One mask per completion, as long as the completion."""
        return [self._mask([self._text(int(token)) for token in tokens_T]) for tokens_T in completions_G]

    def _mask(self, texts: Sequence[str]) -> Mask:
        ends_T = np.cumsum([len(text) for text in texts], dtype=np.int64)
        starts_T = ends_T - [len(text) for text in texts]
        mask_T = np.zeros(len(texts), dtype=np.bool_)
        for sentence in SENTENCE.finditer("".join(texts)):
            if sentence.group().endswith("?") or self._plans.match(sentence.group()):
                mask_T |= (starts_T < sentence.end()) & (ends_T > sentence.start())
        return mask_T

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._decode(token)
        return self._texts[token]


def create(context: PluginContext) -> QuestionDetector:
    """The detector, with the tokenizer of the run's model."""
    tokenizer = context.tokenizer
    params = context.params if isinstance(context.params, Params) else Params()
    return QuestionDetector(lambda token: str(tokenizer.decode([token], skip_special_tokens=True)), params.openings)
{% if cookiecutter.form == "file" %}


PLUGIN = PluginSpec(
    name="{{ cookiecutter.name }}",
    summary="{{ cookiecutter.description }}",
    factory=create,
    params=Params,
)
{% endif %}
