"""A stand-in for the tokenizer of a model that is not here yet: a token per character, and no chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class PlainTokenizer:
    """Enough of a tokenizer to look at prompts and to try a verifier; its lengths say nothing about the model's."""

    chat_template = None

    def __call__(self, texts: str | Sequence[str], **_: Any) -> dict[str, Any]:
        rows = [[ord(char) for char in text] for text in ([texts] if isinstance(texts, str) else texts)]
        return {"input_ids": rows[0] if isinstance(texts, str) else rows}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """The text of these tokens."""
        return "".join(chr(int(each)) for each in ids)
