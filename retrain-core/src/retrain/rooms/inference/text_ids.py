"""Token ids from the texts of tokens, for servers that return no ids: exact, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from retrain.rooms.inference.client import BadAnswerError

ID_PREFIX = "token_id:"  # how some servers write the id itself where a text would stand


class TextIds:
    """The tokens of a tokenizer by the text that a server shows for them.

    Several tokens of a byte-level vocabulary read the same (parts of one character all read as the replacement
    character): such a text names no id, and re-encoding the whole would only guess, so it is refused.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def ids(self, texts: Sequence[Any]) -> list[int]:
        """The id of each text; BadAnswerError at the first that stands for no token or for several."""
        return [self._id(text) for text in texts]

    def prompt_text(self, prompt_T: list[int]) -> str:
        """The text that the server's tokenizer turns into exactly this prompt; BadAnswerError when ours does not."""
        text = str(self._tokenizer.decode(prompt_T, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if self._tokenizer(text, add_special_tokens=False)["input_ids"] != prompt_T:
            raise BadAnswerError("the prompt's text does not encode to the prompt's ids again, and ids are not taken")
        return text

    def _id(self, text: Any) -> int:
        if not isinstance(text, str):
            raise BadAnswerError(f"{text!r} is not the text of a token")
        digits = text.removeprefix(ID_PREFIX)
        if digits != text and digits.isdecimal():
            return int(digits)
        found = self._by_text.get(text, ())
        if len(found) != 1:
            reason = f"stands for {len(found)} tokens" if found else "stands for no token"
            raise BadAnswerError(f"the server returns no token ids, and the text {text!r} {reason}")
        return found[0]

    @cached_property
    def _by_text(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for token in range(len(self._tokenizer)):
            text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            found[text] = (*found.get(text, ()), token)
        return found
