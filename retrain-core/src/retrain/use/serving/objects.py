"""The JSON of OpenAI's API: answers to completions, chats and responses, their chunks, models and errors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from retrain.use.serving.parse import LABELS, NEUTRAL, Asked, Body, RequestError, parse, refuse_unsupported
from retrain.use.serving.service import LEAST, Answer, Answers, Choice, kept_tokens, top_dict

Json = dict[str, Any]
ERROR_TYPES: Mapping[int, str] = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
# Fields with the same meaning in a chat, under the same name or another one.
RENAMED = {"input": "messages", "max_output_tokens": "max_tokens"}
SAME = ("model", "temperature", "stream", "parallel_tool_calls")
NEUTRAL_HERE: Mapping[str, Sequence[Any]] = {
    "background": (False,),
    "include": ([],),
    "reasoning": ({},),
    "service_tier": NEUTRAL["service_tier"],
    "store": NEUTRAL["store"],
    "stream_options": ({}, {"include_obfuscation": False}),
    "text": ({}, {"format": {"type": "text"}}),
    "top_logprobs": (0,),
    "top_p": NEUTRAL["top_p"],
    "truncation": ("disabled",),
}
READ_HERE = frozenset({*SAME, *RENAMED, "instructions", "tools", "tool_choice"})


def error_object(error: RequestError) -> Json:
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


class Writer:
    """The objects of one answer, whole or as the chunks of a stream; they share id and time."""

    done = b"data: [DONE]\n\n"

    def __init__(self, service: Answers, answer: Answer) -> None:
        self._service, self._answer = service, answer
        # Alternatives, echoed log-probabilities and the text apart from calls are known last.
        self._waits = bool(answer.asked.top or answer.asked.echo or answer.asked.tools)
        kind, self._object = ("chatcmpl", "chat.completion") if answer.is_chat else ("cmpl", "text_completion")
        self._head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": answer.model}

    def whole(self) -> Json:
        choices = [self._whole_choice(choice) for choice in self._answer.choices]
        return self._object_of(choices) | {"usage": self._answer.usage}

    def begin(self) -> list[Json]:
        return [] if self._waits else self._speakers()

    def grow(self, choice: Choice, text: str, part: slice) -> list[Json]:
        is_shown = text or self._answer.asked.top is not None
        return [self._grown(choice, text, part)] if is_shown and not self._waits else []

    def end(self) -> list[Json]:
        """Return the last chunks: whole choices where they had to wait, finish reasons, and the requested usage."""
        chunks = self._speakers() if self._waits else []
        for choice in self._answer.choices:
            if self._waits:
                text = self._text(choice) if choice.message is None else choice.message
                chunks.append(self._grown(choice, text, slice(0, len(choice.tokens))))
            if choice.calls:
                delta = {"tool_calls": [{"index": place, **call} for place, call in enumerate(choice.calls)]}
                chunks.append(self._chunk({"index": choice.index, "delta": delta, "logprobs": None}))
            body: Json = {"delta": {}} if self._answer.is_chat else {"text": ""}
            chunks.append(self._chunk({"index": choice.index, **body, "logprobs": None}, choice.reason))
        if self._answer.asked.include_usage:
            chunks.append(self._object_of([], is_chunk=True) | {"usage": self._answer.usage})
        return chunks

    def failure(self, error: RequestError) -> Json:
        return error_object(error)

    def _speakers(self) -> list[Json]:
        if not self._answer.is_chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._chunk({"index": c.index, "delta": delta, "logprobs": None}) for c in self._answer.choices]

    def _grown(self, choice: Choice, text: str, part: slice) -> Json:
        if self._answer.is_chat:
            body: Json = {"delta": {"content": text}, "logprobs": self._chat(choice, part)}
        else:
            body = {"text": text, "logprobs": self._plain(choice, part)}
        return self._chunk({"index": choice.index, **body})

    def _whole_choice(self, choice: Choice) -> Json:
        part = slice(0, len(choice.tokens))
        if self._answer.is_chat:
            content, calls = (choice.text, ()) if choice.message is None else (choice.message, choice.calls)
            message: Json = {"role": "assistant", "content": content, "refusal": None}
            if calls:
                message |= {"content": content or None, "tool_calls": list(calls)}
            body: Json = {"message": message, "logprobs": self._chat(choice, part)}
        else:
            body = {"text": self._text(choice), "logprobs": self._plain(choice, part)}
        return {"index": choice.index, **body, "finish_reason": choice.reason}

    def _text(self, choice: Choice) -> str:
        return (choice.prompt if self._answer.asked.echo else "") + choice.text

    def _chunk(self, choice: Json, reason: str | None = None) -> Json:
        return self._object_of([{**choice, "finish_reason": reason}], is_chunk=True)

    def _object_of(self, choices: Sequence[Json], *, is_chunk: bool = False) -> Json:
        suffix = ".chunk" if is_chunk and self._answer.is_chat else ""
        return {**self._head, "object": self._object + suffix, "choices": list(choices)}

    def _plain(self, choice: Choice, part: slice) -> Json | None:
        if self._answer.asked.top is None:
            return None
        tokens, prompt = choice.tokens, len(choice.prompt_T) if self._answer.asked.echo else 0
        texts = self._service.texts([*choice.prompt_T.tolist()[:prompt], *tokens])
        last = prompt + min(part.stop, kept_tokens(choice, texts[prompt:]))
        offsets = list(accumulate(map(len, texts), initial=0))
        places = range(0 if part.start == 0 else prompt + part.start, last)
        before = len(choice.prompt_T) - prompt  # of the row that alternatives are known of
        tops = [top_dict(self._service, choice, before + place) for place in places] if self._answer.asked.top else None
        return {
            "tokens": [texts[place] for place in places],
            "token_logprobs": [self._logprob(choice, before + place) for place in places],
            "top_logprobs": tops,
            "text_offset": [offsets[place] for place in places],
        }

    def _chat(self, choice: Choice, part: slice) -> Json | None:
        """Return log-probabilities in the form of chats, without the token that ends the message."""
        top = self._answer.asked.top
        if top is None:
            return None
        texts = self._service.texts(choice.tokens)
        before, entries = len(choice.prompt_T), []
        for place in range(part.start, min(part.stop, kept_tokens(choice, texts))):
            if choice.tokens[place] in self._service.special:
                continue
            found = top_dict(self._service, choice, before + place) if top else {}
            tops = [_token(text, logprob) for text, logprob in (found or {}).items()]
            entries.append(_token(texts[place], self._logprob(choice, before + place)) | {"top_logprobs": tops})
        return {"content": entries, "refusal": None}

    def _logprob(self, choice: Choice, place: int) -> float | None:
        """Return the log-probability at a place of prompt and completion; None for the first token."""
        if choice.tops is not None:
            return max(float(choice.tops.logprobs_T[place]), LEAST) if place else None
        return max(choice.logprobs[place - len(choice.prompt_T)], LEAST)


def _token(text: str, logprob: float | None) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", errors="replace"))}


def parse_response(body: Any) -> Asked:
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    refuse_unsupported(body, READ_HERE, NEUTRAL_HERE)
    instructions, tools, choice = body.get("instructions"), body.get("tools") or [], body.get("tool_choice")
    if instructions is not None and not isinstance(instructions, str):
        raise RequestError("instructions must be a text", param="instructions")
    if not isinstance(tools, list) or not all(isinstance(t, dict) and t.get("type") == "function" for t in tools):
        raise RequestError("tools must be a list of functions: {'type': 'function', 'name': ...}", param="tools")
    system = [{"role": "system", "content": instructions}] if instructions else []
    chat: Json = {name: body[name] for name in (*SAME, *LABELS) if name in body}
    chat |= {
        "messages": [*system, *_messages(body.get("input"))],
        "max_tokens": body.get("max_output_tokens"),
        # here the tool itself has the fields of the function
        "tools": [{"type": "function", "function": {n: v for n, v in t.items() if n != "type"}} for t in tools],
        "tool_choice": choice,
    }
    if isinstance(choice, dict) and choice.get("type") == "function":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    try:
        return parse(chat, is_chat=True)
    except RequestError as error:
        error.param = {new: old for old, new in RENAMED.items()}.get(error.param or "", error.param)
        raise


class ResponseWriter:
    """The objects of one answer as a response, and the numbered events of its stream."""

    done = b""

    def __init__(self, body: Body, answer: Answer) -> None:
        self._body, self._answer = body, answer
        # The text apart from calls is known only at the end.
        self._waits = bool(answer.asked.tools)
        self._created = int(time.time())
        self._id, self._message_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._events = 0

    def whole(self) -> Json:
        choice, usage = self._answer.choices[0], self._answer.usage
        is_cut = choice.reason == "length"
        text = choice.text if choice.message is None else choice.message
        items = [self._message(text)] if text or not choice.calls else []
        for call in choice.calls:
            head = {"id": f"fc_{call['id']}", "type": "function_call", "status": "completed", "call_id": call["id"]}
            items.append(head | call["function"])
        return self._response("incomplete" if is_cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def begin(self) -> list[Json]:
        begun = self._response("in_progress")
        events = [self._event(f"response.{kind}", response=begun) for kind in ("created", "in_progress")]
        return events if self._waits else [*events, *self._message_events()]

    def grow(self, choice: Choice, text: str, part: slice) -> list[Json]:
        return [self._delta(text)] if text and not self._waits else []

    def end(self) -> list[Json]:
        events: list[Json] = []
        whole = self.whole()
        for place, item in enumerate(whole["output"]):
            if item["type"] == "message":
                text = item["content"][0]["text"]
                events += [*self._message_events(), self._delta(text)] if self._waits else []
                events.append(self._of_text("response.output_text.done", text=text, logprobs=[]))
                events.append(self._of_text("response.content_part.done", part=_text_part(text)))
            else:
                at = {"output_index": place, "item_id": item["id"]}
                begun, arguments = item | {"status": "in_progress", "arguments": ""}, item["arguments"]
                events += [
                    self._event("response.output_item.added", output_index=place, item=begun),
                    self._event("response.function_call_arguments.delta", delta=arguments, **at),
                    self._event("response.function_call_arguments.done", name=item["name"], arguments=arguments, **at),
                ]
            events.append(self._event("response.output_item.done", output_index=place, item=item))
        events.append(self._event(f"response.{whole['status']}", response=whole))
        return events

    def failure(self, error: RequestError) -> Json:
        return self._event("error", code=error.code, message=str(error), param=error.param)

    def _message_events(self) -> list[Json]:
        item = self._message("") | {"status": "in_progress", "content": []}
        return [
            self._event("response.output_item.added", output_index=0, item=item),
            self._of_text("response.content_part.added", part=_text_part("")),
        ]

    def _delta(self, text: str) -> Json:
        return self._of_text("response.output_text.delta", delta=text, logprobs=[])

    def _message(self, text: str) -> Json:
        head = {"id": self._message_id, "type": "message", "status": "completed", "role": "assistant"}
        return head | {"content": [_text_part(text)]}

    def _response(self, status: str) -> Json:
        body, answer = self._body, self._answer
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "model": answer.model,
            "output": [],
            "parallel_tool_calls": not answer.asked.one_call,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": answer.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": 1.0,
            "truncation": "disabled",
            "usage": None,
        }

    def _of_text(self, kind: str, **fields: Any) -> Json:
        return self._event(kind, item_id=self._message_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **fields}


def _messages(given: Any) -> list[Json]:
    """Return the items of an input as messages; the calls of a turn join its text in one message, as in a chat."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given or not all(isinstance(item, dict) for item in given):
        raise RequestError("input must be a text or a list of items", param="input")
    messages: list[Json] = []
    for item in given:
        kind = item.get("type", "message")
        if kind == "message" and isinstance(item.get("role"), str):
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": _text_of(item.get("content"))})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _text_of(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            raise RequestError(f"input: items of type {str(kind)[:64]!r} are not supported", param="input")
    return messages


def _text_of(content: Any) -> str:
    texts = []
    for part in [content] if isinstance(content, str) else content if isinstance(content, list) else [None]:
        match part:
            case str(text) if part is content:
                texts.append(text)
            case {"type": "input_text" | "output_text" | "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise RequestError("input: a content must be a text, or a list of text parts", param="input")
    return "".join(texts)


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
