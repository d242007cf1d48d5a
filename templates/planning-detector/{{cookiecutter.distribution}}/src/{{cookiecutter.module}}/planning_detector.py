"""Planning detector `{{ cookiecutter.name }}`: sentences that ask, or that announce what comes next."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from retrain.api import Mask, PluginContext, Tokens

OPENINGS = ("let's", "let us", "first", "next", "then", "now", "wait", "alternatively", "i need to", "we need to")
SENTENCE = re.compile(r"[^.!?\n]+[.!?\n]?")
PLANS = re.compile(rf"\s*(?:{'|'.join(map(re.escape, OPENINGS))})\b", flags=re.IGNORECASE)


class QuestionDetector:
    """Marks every token that covers a character of a planning sentence. `decode` gives the text of one token id."""

    def __init__(self, decode: Callable[[int], str]) -> None:
        self._decode = decode
        self._pieces: dict[int, str] = {}  # there are far fewer token ids than tokens

    def masks(self, completions_G: Sequence[Tokens]) -> list[Mask]:
        """One mask per completion, of its length."""
        return [self._mask([self._piece(int(token)) for token in tokens_T]) for tokens_T in completions_G]

    def _mask(self, pieces: Sequence[str]) -> Mask:
        ends_T = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        starts_T = ends_T - [len(piece) for piece in pieces]
        mask_T = np.zeros(len(pieces), dtype=np.bool_)
        for sentence in SENTENCE.finditer("".join(pieces)):
            if sentence.group().endswith("?") or PLANS.match(sentence.group()):
                mask_T |= (starts_T < sentence.end()) & (ends_T > sentence.start())
        return mask_T

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self._decode(token)
        return self._pieces[token]


def create(context: PluginContext) -> QuestionDetector:
    """The detector, with the tokenizer of the run's model."""
    tokenizer = context.tokenizer
    return QuestionDetector(lambda token: str(tokenizer.decode([token], skip_special_tokens=True)))
