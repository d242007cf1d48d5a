"""Reads the body of a request: what the engine can do exactly as asked, or a refusal that names the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrain.text.chat import as_chat

Body = Mapping[str, Any]
MOST_CHOICES, MOST_PROMPTS, MOST_STOPS, MOST_TOP = 128, 256, 16, 20
# Sampling is from the full distribution, whose log-probabilities are reported: other values than these are refused.
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
LABELS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})  # no answer depends on them
OF_TOOLS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
CALL_START, CALL_END = "<tool_call>\n", "</tool_call>"
READ = frozenset(
    {
        *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "n", "seed", "stop"),
        *("stream", "stream_options", "logprobs", "top_logprobs", "echo"),
    }
)


class RequestError(Exception):
    """A request that is refused: HTTP status, message, and the field and code of OpenAI's error object."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request in the engine's terms; the prompts are not encoded yet.

    `top` is how many alternatives are wanted at each token, None when log-probabilities are not. `max_tokens` None:
    as many as the server allows. `tools` are JSON schemas for the chat template, none where they may not be called.
    `opening` is how an answer that must call a tool begins, and `one_call` ends it after its first call.
    """

    model: str
    prompts: Sequence[str | list[int]]
    messages: Sequence[Mapping[str, Any]]
    max_tokens: int | None
    temperature: float | None
    n: int
    seed: int | None
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    top: int | None
    echo: bool
    tools: Sequence[Mapping[str, Any]] = ()
    opening: str = ""
    one_call: bool = False


def parse(body: Any, *, is_chat: bool) -> Asked:
    """The request of a body; RequestError on a field that is wrong, unknown, or asks for what is not done here."""
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    tools = _tools(body) if is_chat else ()
    others = {"prompt", "echo"} if is_chat else {"messages", "top_logprobs", "max_completion_tokens"}
    refuse_unsupported({k: v for k, v in body.items() if not (tools and k in OF_TOOLS)}, READ - others, NEUTRAL)
    limit = _integer(body, "max_completion_tokens", 1) if is_chat else None
    lowest = 0 if body.get("echo") else 1
    stream = _flag(body, "stream")
    options = body.get("stream_options")
    if options is not None and not (stream and isinstance(options, dict)):
        raise RequestError("stream_options belongs to a stream, and is an object", param="stream_options")
    for name, value in (options or {}).items():
        if name != "include_usage" and value:
            raise RequestError(f"{_shown(name)} is not supported", param=f"stream_options.{name}"[:64])
    return Asked(
        model=_text(body, "model"),
        prompts=() if is_chat else _prompts(body),
        messages=_messages(body) if is_chat else (),
        max_tokens=_integer(body, "max_tokens", lowest) if limit is None else limit,
        temperature=_number(body, "temperature", 0.0, 10.0),
        n=_integer(body, "n", 1, MOST_CHOICES) or 1,
        seed=_integer(body, "seed", -(2**63), 2**63 - 1),
        stops=_stops(body),
        stream=stream,
        include_usage=stream and bool((options or {}).get("include_usage")),
        top=_top(body, is_chat=is_chat),
        echo=not is_chat and _flag(body, "echo"),
        tools=() if body.get("tool_choice") == "none" else tools,
        opening=_opening(body, tools) if tools else "",
        one_call=bool(tools) and body.get("parallel_tool_calls") is not None and not _flag(body, "parallel_tool_calls"),
    )


def refuse_unsupported(body: Body, read: frozenset[str], neutral: Mapping[str, Sequence[Any]]) -> None:
    """RequestError on a field that is not read, or has another value than those that change nothing."""
    for name, value in body.items():
        if name in LABELS or value is None:
            continue
        if name in neutral:
            if value not in neutral[name]:
                only = " or ".join(repr(each) for each in neutral[name])
                message = f"{name} = {_shown(value)} is not supported: completions come from the full distribution"
                raise RequestError(f"{message}. Leave it out, or give {only}", param=name, code="unsupported_value")
        elif name not in read:
            raise RequestError(f"unknown field {_shown(name)}", param=name[:64], code="unknown_parameter")


def _prompts(body: Body) -> Sequence[str | list[int]]:
    """One prompt or several, each a text or token ids."""
    given = body.get("prompt")
    if isinstance(given, str) or _are_tokens(given):
        given = [given]
    is_list = isinstance(given, list) and given and all(isinstance(each, str) or _are_tokens(each) for each in given)
    if not is_list:
        raise RequestError("prompt must be a text, a list of texts, token ids, or a list of those", param="prompt")
    assert isinstance(given, list)
    if len(given) > MOST_PROMPTS:
        raise RequestError(f"at most {MOST_PROMPTS} prompts in one request", param="prompt")
    return given


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _messages(body: Body) -> Sequence[Mapping[str, Any]]:
    messages = as_chat(body.get("messages"))
    if not messages:
        raise RequestError("messages must be a list of objects with a role and a text as content", param="messages")
    return messages


def _tools(body: Body) -> Sequence[Mapping[str, Any]]:
    given = body.get("tools") or []
    if not isinstance(given, list) or not all(_is_function(tool) for tool in given):
        message = "tools must be a list of functions: {'type': 'function', 'function': {'name': ...}}"
        raise RequestError(message, param="tools")
    return given


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and bool(function["name"])


def _opening(body: Body, tools: Sequence[Mapping[str, Any]]) -> str:
    """How an answer begins that must call a tool, or a certain one."""
    wanted = body.get("tool_choice")
    if wanted in (None, "auto", "none"):
        return ""
    if wanted == "required":
        return CALL_START
    names = {tool["function"]["name"] for tool in tools}
    function = wanted.get("function") if isinstance(wanted, dict) and wanted.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in names:
        known = f"none, auto, required, or a function of tools: {', '.join(sorted(names))[:200]}"
        message = f"tool_choice = {_shown(wanted)} is not supported; there are {known}"
        raise RequestError(message, param="tool_choice", code="unsupported_value")
    return f'{CALL_START}{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '


def _stops(body: Body) -> tuple[str, ...]:
    given = body.get("stop")
    found = [given] if isinstance(given, str) else given or []
    if not isinstance(found, list) or not all(isinstance(each, str) and each for each in found):
        raise RequestError("stop must be a text that is not empty, or a list of them", param="stop")
    if len(found) > MOST_STOPS:
        raise RequestError(f"at most {MOST_STOPS} stop texts", param="stop")
    return tuple(found)


def _top(body: Body, *, is_chat: bool) -> int | None:
    if not is_chat:
        return _integer(body, "logprobs", 0, MOST_TOP)
    top = _integer(body, "top_logprobs", 0, MOST_TOP)
    if not _flag(body, "logprobs"):
        if top:
            raise RequestError("top_logprobs needs logprobs = true", param="top_logprobs")
        return None
    return top or 0


def _text(body: Body, name: str) -> str:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{name} must be a text", param=name)
    return value or ""


def _flag(body: Body, name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false", param=name)
    return bool(value)


def _integer(body: Body, name: str, low: int, high: int = 2**31) -> int | None:
    value = body.get(name)
    if value is not None and (type(value) is not int or not low <= value <= high):
        raise RequestError(f"{name} must be a whole number from {low} to {high}, not {_shown(value)}", param=name)
    return value


def _number(body: Body, name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
        raise RequestError(f"{name} must be a number from {low:g} to {high:g}, not {_shown(value)}", param=name)
    return float(value)


def _shown(value: Any) -> str:
    return repr(value)[:80]
