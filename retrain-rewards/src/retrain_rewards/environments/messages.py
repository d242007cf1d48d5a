"""Chat messages of libraries as the kernel's plain ones, and text of tools and servers made fit for a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from retrain.api import Message


class UnsupportedContentError(ValueError):
    """A message holds something other than text."""


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Chat messages as plain data: role, text and tool calls; UnsupportedContentError on images and the like.

    Arguments of tool calls become objects, which is what chat templates expect.
    """
    found: list[Message] = []
    for message in messages:
        plain: dict[str, Any] = {"role": str(message.get("role") or "user"), "content": text_of(message.get("content"))}
        if message.get("tool_calls"):
            plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
        plain |= {name: message[name] for name in ("tool_call_id", "name") if isinstance(message.get(name), str)}
        found.append(plain)
    return found


def plain_data(value: Any) -> Any:
    """The value as JSON data; parts that JSON does not have become text."""
    return json.loads(json.dumps(value, default=str))


def text_of(content: Any) -> str:
    """The text of a message's content, which is text or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise UnsupportedContentError(f"content of type {type(content).__name__}")
    texts = []
    for part in content:
        fields = {"text": part} if isinstance(part, str) else part
        read = fields.get if isinstance(fields, Mapping) else partial(getattr, fields)
        kind, text = read("type", None), read("text", None)
        if kind not in ("text", None) or not isinstance(text, str):
            raise UnsupportedContentError(f"content of kind {kind or type(part).__name__!r}")
        texts.append(text)
    return "".join(texts)


def _plain_call(call: Any) -> dict[str, Any]:
    function = call.get("function") or call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {"text": arguments}
    called = {"name": str(function.get("name")), "arguments": plain_data(arguments or {})}
    return {"id": str(call.get("id") or ""), "type": "function", "function": called}


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
