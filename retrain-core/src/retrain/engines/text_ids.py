"""Token ids from the texts of tokens, for servers that return no ids: exact, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from retrain.engines.client import BadAnswerError

ID_PREFIX = "token_id:"  # some servers write the id itself in place of the text


class TextIds:
    """The tokens of a tokenizer by the text that a server shows for them.

    In a byte-level vocabulary several tokens share one text (fragments of a character all show as the replacement
    character). Such a text identifies no token and is refused, because re-encoding the completion would only guess.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def ids(self, texts: Sequence[Any]) -> list[int]:
        """The id of each text; BadAnswerError at the first that matches no token or several."""
        return [self._id(text) for text in texts]

    def _id(self, text: Any) -> int:
        if not isinstance(text, str):
            raise BadAnswerError(f"{text!r} is not the text of a token")
        digits = text.removeprefix(ID_PREFIX)
        if digits != text and digits.isdecimal():
            return int(digits)
        found = self._by_text.get(text, ())
        if len(found) != 1:
            reason = f"matches {len(found)} tokens" if found else "matches no token"
            raise BadAnswerError(f"the server returns no token ids, and the text {text!r} {reason}")
        return found[0]

    @cached_property
    def _by_text(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for token in range(len(self._tokenizer)):
            text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            found[text] = (*found.get(text, ()), token)
        return found
