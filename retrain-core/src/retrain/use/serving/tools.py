"""Tools in a chat: messages as templates read them, and the calls in what the policy wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrain.text.tool_calls import ToolCall, parse_tool_calls, plain_tool_calls
from retrain.use.serving.parse import CALL_END, RequestError

MESSAGE_FIELDS = ("role", "content", "name", "tool_call_id")


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Role, text, name and tool calls of a message, with arguments as objects, which is what templates expect."""
    if message.get("function_call") is not None:
        raise RequestError("function_call is not supported: use tool_calls", param="messages")
    plain = {name: message[name] for name in MESSAGE_FIELDS if message.get(name) is not None}
    if message.get("tool_calls"):
        try:
            plain["tool_calls"] = plain_tool_calls(message["tool_calls"])
        except ValueError as error:
            raise RequestError(str(error), param="messages") from None
    return plain


def read_calls(opening: str, text: str, stopped_by: str | None) -> tuple[str, str, tuple[ToolCall, ...]]:
    """What the policy's answer is with its opening and the end of its one call; its message, and its calls.

    A policy may write a whole call after an opening that has begun one already; that one counts then.
    """
    ending = CALL_END if stopped_by == CALL_END else ""
    whole = f"{opening}{text}{ending}"
    message, calls = parse_tool_calls(whole)
    if opening and not calls:
        message, calls = parse_tool_calls(text + ending)
    return whole, message if calls else whole, calls


def wire_calls(calls: Sequence[ToolCall], head: str) -> list[dict[str, Any]]:
    """Calls in OpenAI's form, under ids that begin with `head`."""
    return [
        {"id": f"call_{head}_{i}", "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
        for i, each in enumerate(calls)
    ]
