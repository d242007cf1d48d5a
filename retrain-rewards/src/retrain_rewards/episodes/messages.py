"""Converts the library's chat messages into the kernel's plain ones; only text is accepted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from retrain.api import Message


class UnsupportedContentError(ValueError):
    """A message holds something other than text."""


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Chat messages as plain data: role, text and tool calls; UnsupportedContentError on images and the like.

    Arguments of tool calls become objects, which is what chat templates expect.
    """
    return [_plain(message) for message in messages]


def plain_data(value: Any) -> Any:
    """The value as JSON data; parts that JSON does not have become text."""
    return json.loads(json.dumps(value, default=str))


def _plain(message: Mapping[str, Any]) -> Message:
    plain: dict[str, Any] = {"role": str(message.get("role") or "user"), "content": text_of(message.get("content"))}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    for name in ("tool_call_id", "name"):
        if isinstance(message.get(name), str):
            plain[name] = message[name]
    return plain


def text_of(content: Any) -> str:
    """The text of a message's content, which is text or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise UnsupportedContentError(f"content of type {type(content).__name__}")
    return "".join(_part(part) for part in content)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else getattr(part, "type", type(part).__name__)
    text = part.get("text") if isinstance(part, Mapping) else getattr(part, "text", None)
    if kind not in ("text", None) or not isinstance(text, str):
        raise UnsupportedContentError(f"content of kind {kind!r}")
    return text


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
