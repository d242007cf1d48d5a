"""The text of each token, such that the texts of all tokens join to that of the completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CONTEXT = 6  # tokens decoded again with each new one: enough for characters that span several tokens
BROKEN = "�"


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """One text per token; a character split over tokens belongs to the last of them. Linear in length."""
    texts: list[str] = []
    start = 0  # first token that is decoded again
    before = ""  # text of tokens[start : done]
    done = 0
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if text.endswith(BROKEN) and end < len(tokens) and end - done < CONTEXT:
            texts.append("")
            continue
        texts.append(text[len(before) :] if text.startswith(before) else text)
        done = end
        if done - start > CONTEXT:
            start = done - CONTEXT // 2
        before = tokenizer.decode(tokens[start:done], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return texts
