"""Reads the body of a request: exactly the engine's features, or a refusal that names the field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from retrain.text.chat import as_chat

Body = Mapping[str, Any]
# Choices and alternatives as in OpenAI's API.
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
# No answer depends on these fields, so they are accepted and ignored.
LABELS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
OF_TOOLS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
CALL_START, CALL_END = "<tool_call>\n", "</tool_call>"
Count = Annotated[int, Field(ge=1, le=2**31)]
NotEmpty = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[int], Field(min_length=1)]
MESSAGES = {
    "prompt": f"prompt must be a text, token ids, or a list of at most {MOST_PROMPTS} of those",
    "stop": f"stop must be a text that is not empty, or a list of at most {MOST_STOPS} of them",
}


class RequestError(Exception):
    """A refusal: HTTP status, message, and the field and code of OpenAI's error object."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request in the engine's terms; the prompts are not encoded yet.

    `top` is the number of alternatives per token, None without log-probabilities. `max_tokens` None: the server's
    limit. `tools` are JSON schemas for the chat template, empty if they may not be called. `opening` begins an answer
    that must call a tool, and `one_call` ends it after its first call.
    """

    model: str
    max_tokens: int | None
    temperature: float | None
    n: int
    seed: int | None
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    prompts: Sequence[str | list[int]] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    top: int | None = None
    echo: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    opening: str = ""
    one_call: bool = False

    @property
    def is_ranked(self) -> bool:
        return bool(self.top or (self.echo and self.top is not None))


def _as_list(value: Any) -> Any:
    is_ids = isinstance(value, list) and value and type(value[0]) is int
    return [value] if isinstance(value, str) or is_ids else value


class _Fields(BaseModel):
    """The fields that chats and completions share; null equals absent."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str = ""
    max_tokens: int | None = Field(None, ge=0, le=2**31)
    temperature: float | None = Field(None, ge=0.0, le=10.0)
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Annotated[list[NotEmpty], Field(max_length=MOST_STOPS), BeforeValidator(_as_list)] = []
    stream: bool = False
    stream_options: dict[str, Any] | None = None


class _Chat(_Fields):
    messages: Any = None  # read by `as_chat`
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    parallel_tool_calls: bool = True


class _Completion(_Fields):
    prompt: Annotated[list[str | TokenIds], Field(min_length=1, max_length=MOST_PROMPTS), BeforeValidator(_as_list)]
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    echo: bool = False


def parse(body: Any, *, is_chat: bool) -> Asked:
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    tools = _tools(body) if is_chat else ()
    model = _Chat if is_chat else _Completion
    read = frozenset(model.model_fields) - {"parallel_tool_calls"}
    refuse_unsupported({k: v for k, v in body.items() if not (tools and k in OF_TOOLS)}, read, NEUTRAL)
    try:
        fields = model.model_validate({name: value for name, value in body.items() if value is not None})
    except ValidationError as error:
        detail = error.errors()[0]
        name = str(detail["loc"][0])
        message = MESSAGES.get(name) or f"{name}: {detail['msg']}, not {_shown(detail['input'])}"
        raise RequestError(message, param=name) from None
    options = fields.stream_options or {}
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("stream_options belongs to a stream", param="stream_options")
    for name, value in options.items():
        if name != "include_usage" and value:
            raise RequestError(f"{_shown(name)} is not supported", param=f"stream_options.{name}"[:64])
    asked = Asked(
        **{name: getattr(fields, name) for name in ("model", "max_tokens", "temperature", "n", "seed", "stream")},
        stops=tuple(fields.stop),
        include_usage=fields.stream and bool(options.get("include_usage")),
    )
    if isinstance(fields, _Chat):
        asked = _chat(asked, fields, body, tools)
    else:
        asked = replace(asked, prompts=fields.prompt, top=fields.logprobs, echo=fields.echo)
    if asked.max_tokens == 0 and not asked.echo:
        raise RequestError("max_tokens must be at least 1", param="max_tokens")
    return asked


def _chat(asked: Asked, fields: _Chat, body: Body, tools: Sequence[Mapping[str, Any]]) -> Asked:
    messages = as_chat(fields.messages)
    if not messages:
        raise RequestError("messages must be a list of objects with a role and a text as content", param="messages")
    if fields.top_logprobs and not fields.logprobs:
        raise RequestError("top_logprobs needs logprobs = true", param="top_logprobs")
    return replace(
        asked,
        messages=messages,
        max_tokens=fields.max_completion_tokens or fields.max_tokens,
        top=(fields.top_logprobs or 0) if fields.logprobs else None,
        tools=() if body.get("tool_choice") == "none" else tools,
        opening=_opening(body, tools) if tools else "",
        one_call=bool(tools) and not fields.parallel_tool_calls,
    )


def refuse_unsupported(body: Body, read: frozenset[str], neutral: Mapping[str, Sequence[Any]]) -> None:
    """Raise RequestError on a field that is not read, unless it has a neutral value."""
    for name, value in body.items():
        if name in LABELS or value is None:
            continue
        if name in neutral:
            if value not in neutral[name]:
                only = " or ".join(map(repr, neutral[name]))
                message = f"{name} = {_shown(value)} is not supported: leave it out, or give {only}"
                raise RequestError(message, param=name, code="unsupported_value")
        elif name not in read:
            raise RequestError(f"unknown field {_shown(name)}", param=name[:64], code="unknown_parameter")


def _tools(body: Body) -> Sequence[Mapping[str, Any]]:
    given = body.get("tools") or []
    for tool in given if isinstance(given, list) else [None]:
        match tool:
            case {"type": "function", "function": {"name": str(name)}} if name:
                continue
        message = "tools must be a list of functions: {'type': 'function', 'function': {'name': ...}}"
        raise RequestError(message, param="tools")
    return list(given)


def _opening(body: Body, tools: Sequence[Mapping[str, Any]]) -> str:
    wanted = body.get("tool_choice")
    if wanted in (None, "auto", "none"):
        return ""
    if wanted == "required":
        return CALL_START
    names = {tool["function"]["name"] for tool in tools}
    match wanted:
        case {"type": "function", "function": {"name": str(name)}} if name in names:
            return f'{CALL_START}{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
    known = f"none, auto, required, or a function of tools: {', '.join(sorted(names))[:200]}"
    message = f"tool_choice = {_shown(wanted)} is not supported; there are {known}"
    raise RequestError(message, param="tool_choice", code="unsupported_value")


def _shown(value: Any) -> str:
    return repr(value)[:80]
