"""Makes text of tools and servers fit for a prompt: of limited length, and without the tokens that structure a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SHORTEST_TOKEN = 3  # characters; a shorter special token is ordinary text, such as a line break
_CONTROLS = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaner:
    """Cleans a text of somebody else before the policy sees it.

    `special` are the tokenizer's special tokens: one of them in a result would end the message that it stands in. A
    space after its first character makes it plain text. `max_chars` limits the length.
    """

    special: tuple[str, ...]
    max_chars: int

    @classmethod
    def of(cls, tokenizer: Any, max_chars: int) -> Cleaner:
        """For the special tokens of a tokenizer."""
        tokens: Sequence[str] = getattr(tokenizer, "all_special_tokens", ())
        found = {str(token) for token in tokens if len(str(token)) >= SHORTEST_TOKEN}
        return cls(special=tuple(sorted(found, key=len, reverse=True)), max_chars=max_chars)

    def __call__(self, text: str) -> str:
        """The text without control characters and special tokens, cut with a note of how much is missing."""
        left_out = len(text) - self.max_chars
        if left_out > 0:
            text = f"{text[: self.max_chars]}\n[{left_out} more characters]"
        text = text.encode("utf-8", "replace").decode("utf-8").translate(_CONTROLS)
        for token in self.special:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text
