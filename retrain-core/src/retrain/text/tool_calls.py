"""Reads tool calls in messages, and the blocks in a policy's text that Hermes and Qwen models write."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call: the tool's name and its arguments as the text of a JSON object."""

    name: str
    arguments: str


def parse_tool_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The text without the calls, and the calls in order.

    A call is `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`. A block that is not such a JSON object is no
    call and stays in the text. A text without calls is returned unchanged.
    """
    calls = {block.start(): call for block in _BLOCK.finditer(text) if (call := _call(block[1]))}
    rest = _BLOCK.sub(lambda block: "" if block.start() in calls else block[0], text)
    return rest.strip() if calls else text, tuple(calls.values())


def plain_tool_calls(calls: Any) -> list[dict[str, Any]]:
    """The tool calls of a message as chat templates read them: named functions with an object of arguments.

    Missing arguments are empty, and JSON text is parsed. ValueError for anything but a list of named calls.
    """
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError("tool_calls must be a list of objects")
    return [_plain(call) for call in calls]


def _plain(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)  # some write the function's fields into the call itself
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError("tool_calls: a call names no function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = {"text": arguments}
    called = {"name": function["name"], "arguments": arguments or {}}
    return {"id": str(call.get("id") or ""), "type": "function", "function": called}


def _call(body: str) -> ToolCall | None:
    try:
        value = json.loads(body)
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
            return None
        arguments = value.get("arguments", {})
        return ToolCall(name=value["name"], arguments=json.dumps(arguments)) if isinstance(arguments, dict) else None
    except (ValueError, RecursionError):  # too deep, or numbers too long, as model output can be
        return None
