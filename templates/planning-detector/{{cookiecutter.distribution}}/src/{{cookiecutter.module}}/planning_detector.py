"""Planning detector `{{ cookiecutter.name }}`: marks questions and sentences that announce a next step."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from retrain.api import Mask, PluginContext, Tokens

OPENINGS = ("let's", "let us", "first", "next", "then", "now", "wait", "alternatively", "i need to", "we need to")
SENTENCE = re.compile(r"[^.!?\n]+[.!?\n]?")
PLANS = re.compile(rf"\s*(?:{'|'.join(map(re.escape, OPENINGS))})\b", flags=re.IGNORECASE)


class QuestionDetector:
    """Marks every token that overlaps a planning sentence. `decode` returns the text of one token id."""

    def __init__(self, decode: Callable[[int], str]) -> None:
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
            if sentence.group().endswith("?") or PLANS.match(sentence.group()):
                mask_T |= (starts_T < sentence.end()) & (ends_T > sentence.start())
        return mask_T

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._decode(token)
        return self._texts[token]


def create(context: PluginContext) -> QuestionDetector:
    """The detector, with the tokenizer of the run's model."""
    tokenizer = context.tokenizer
    return QuestionDetector(lambda token: str(tokenizer.decode([token], skip_special_tokens=True)))
