"""The JSON of OpenAI's API: answers, their chunks, models and errors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from retrain.use.serving.parse import RequestError
from retrain.use.serving.service import LEAST, Answer, Answers, Choice, kept_tokens, top_dict

Json = dict[str, Any]
ERROR_TYPES: Mapping[int, str] = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_object(error: RequestError) -> Json:
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def model_object(name: str, created: int, limit: int | None) -> Json:
    entry: Json = {"id": name, "object": "model", "created": created, "owned_by": "retrain"}
    return entry if limit is None else entry | {"max_model_len": limit}


class Writer:
    """The objects of one answer, whole or as the chunks of a stream; they share id and time."""

    done = b"data: [DONE]\n\n"

    def __init__(self, service: Answers, answer: Answer) -> None:
        self._service, self._answer = service, answer
        self._waits = bool(answer.asked.top or answer.asked.echo or answer.asked.tools)  # the first chunk is known last
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
        """Return log-probabilities in the form of completions; with `echo` they begin with the prompt's."""
        if self._answer.asked.top is None:
            return None
        tokens, prompt = choice.tokens, len(choice.prompt_T) if self._answer.asked.echo else 0
        texts = self._service.texts([*choice.prompt_T.tolist()[:prompt], *tokens])
        last = prompt + min(part.stop, kept_tokens(choice, texts[prompt:]))
        offsets = [0]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
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
            if self._service.is_end(choice.tokens[place]):
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
