"""The text of each token, such that the pieces of a completion join to its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CONTEXT = 6  # tokens decoded again with each new one: enough for characters that span several tokens
BROKEN = "�"


def token_pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """One piece of text per token; a character split over tokens belongs to the last of them. Linear in length."""
    pieces: list[str] = []
    start = 0  # first token that is decoded again
    before = ""  # text of tokens[start : done]
    done = 0
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if text.endswith(BROKEN) and end < len(tokens) and end - done < CONTEXT:
            pieces.append("")
            continue
        pieces.append(text[len(before) :] if text.startswith(before) else text)
        done = end
        if done - start > CONTEXT:
            start = done - CONTEXT // 2
        before = tokenizer.decode(tokens[start:done], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return pieces
