"""From a request to its answer: encodes prompts, decodes tokens, and routes them to their choices."""

from __future__ import annotations

import secrets
import threading
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from retrain.kernel.types import LogprobRow, Sample, SampleRequest, StopReason, Tokens
from retrain.run.opened import Opened
from retrain.run.seed_sources import sample_seed
from retrain.run.streaming import TopLogprobs
from retrain.text.chat import chat_text
from retrain.text.thinking import template_args
from retrain.text.tokenizer import context_length, token_texts
from retrain.text.tool_calls import ToolCall, parse_tool_calls, plain_tool_calls
from retrain.use.serving.batcher import Batcher, BusyError, Failure, Generation, Inbox, Piece, Ranking, Work
from retrain.use.serving.parse import CALL_END, Asked, RequestError
from retrain.use.serving.text_stream import TextStream

Json = dict[str, Any]
# JSON has no minus infinity; vLLM writes this number in its place.
LEAST = -9999.0
# At temperature 0 every log-probability would be 0 or minus infinity.
GREEDY_TEMPERATURE = 1.0
MESSAGE_FIELDS = ("role", "content", "name", "tool_call_id")


@dataclass(slots=True, kw_only=True, eq=False)
class Choice:
    """One completion of an answer so far.

    `tops` cover prompt and completion, where requested. `pieces` are the sampled tokens; the first `len(tokens)` belong
    to the completion. `message` and `calls` are sent to a chat's client when tools were offered, once they are
    complete.
    """

    index: int
    prompt: str
    prompt_T: Tokens
    stream: TextStream
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None
    tops: TopLogprobs | None = None
    pieces: list[Sample] = field(default_factory=list)
    message: str | None = None
    calls: Sequence[Json] = ()

    @property
    def text(self) -> str:
        return self.stream.text


@dataclass(slots=True, kw_only=True, eq=False)
class Answer:
    asked: Asked
    is_chat: bool
    model: str
    temperature: float
    choices: list[Choice]
    works: list[Generation]
    events: Inbox

    @property
    def usage(self) -> dict[str, int]:
        # Every prompt counts once, however many choices it has.
        prompts = sum(len(choice.prompt_T) for choice in self.choices[:: self.asked.n])
        sampled = sum(len(choice.tokens) for choice in self.choices)
        return {"prompt_tokens": prompts, "completion_tokens": sampled, "total_tokens": prompts + sampled}


class Answers:
    """Answers any number of clients with the samples of one batcher.

    `models` are the names that requests may give, `limit` the length of a context.
    """

    def __init__(
        self, tokenizer: Any, batcher: Batcher, *, models: Collection[str], limit: int | None, lock: threading.Lock
    ) -> None:
        self.models, self.limit = models, limit
        self._tokenizer, self._batcher = tokenizer, batcher
        self.special = frozenset(tokenizer.all_special_ids)
        # The Rust library refuses two threads at once.
        self._tokenizer_lock = lock

    def start(self, asked: Asked, events: Inbox, *, is_chat: bool, is_retry: bool = False) -> Answer:
        """Encode the prompts and queue their completions; RequestError where that is not possible.

        The tokens arrive in `events`. `is_retry`: the client sent the same request before, and got no answer.
        """
        raise NotImplementedError

    def finish(self, answer: Answer) -> None:
        """The answer is complete, and its last bytes are about to be sent."""

    def delivered(self, answer: Answer) -> None:
        """All of it has been sent."""

    async def follow(self, answer: Answer) -> AsyncIterator[tuple[Choice, str, slice]]:
        """Yield each choice that has grown, with its new text and new tokens; the last one sets its `reason`.

        Requested alternatives are there once this has ended.
        """
        of_work = {id(work): number * answer.asked.n for number, work in enumerate(answer.works)}
        left = len(answer.works) * answer.asked.n
        while left:
            work, event = await _next(answer.events)
            assert isinstance(work, Generation)
            assert isinstance(event, Piece)
            choice = answer.choices[of_work[id(work)] + event.place]
            if choice.reason is None:
                yield self._take(work, choice, event)
                left -= choice.reason is not None
        for choice in answer.choices:
            # With max_tokens = 0 no piece arrives that could set a reason.
            choice.reason = choice.reason or "length"
        if answer.asked.is_ranked:
            await self._rank(answer)

    def cancel(self, answer: Answer) -> None:
        """Drop work that has no client any more."""
        for work in answer.works:
            work.is_cancelled = True

    def _new_answer(
        self,
        asked: Asked,
        events: Inbox,
        prompts: Sequence[tuple[str, Tokens]],
        seed_of: Callable[[int, int], int],
        *,
        is_chat: bool,
        model: str,
        temperature: float,
        max_tokens: int,
        greedy: bool,
    ) -> Answer:
        places = range(asked.n)
        stops = (*asked.stops, CALL_END) if asked.one_call else asked.stops
        choices = [
            Choice(
                index=number * asked.n + place,
                prompt=text,
                prompt_T=tokens_T,
                stream=TextStream(self._tokenizer, stops),
            )
            for number, (text, tokens_T) in enumerate(prompts)
            for place in places
        ]
        works = [
            Generation(
                model=model,
                temperature=temperature,
                events=events,
                request=SampleRequest(prompt_T=tokens_T, seeds_G=tuple(seed_of(number, place) for place in places)),
                max_tokens=max_tokens,
                greedy=greedy,
            )
            for number, (_, tokens_T) in enumerate(prompts if max_tokens else ())
        ]
        return Answer(
            asked=asked,
            is_chat=is_chat,
            model=model,
            temperature=temperature,
            choices=choices,
            works=works,
            events=events,
        )

    def _rendered(self, messages: Sequence[Mapping[str, Any]], asked: Asked, template_args: Mapping[str, Any]) -> str:
        """Return the conversation as text, with the opening of a required call; the caller holds the tokenizer."""
        if asked.tools and not self._tokenizer.chat_template:
            message = "the model has no chat template that could show tools"
            raise RequestError(message, param="tools", code="unsupported_value")
        try:
            return chat_text(messages, self._tokenizer, template_args, asked.tools) + asked.opening
        except Exception as error:
            # A template is a program of the model's author, and may raise anything.
            message = f"the chat template refuses the messages: {type(error).__name__}: {str(error)[:300]}"
            raise RequestError(message, param="messages") from None

    def _read_tools(self, answer: Answer, choice: Choice) -> str:
        """Read the calls in a complete text, where tools were offered; returns the policy's whole text."""
        asked = answer.asked
        if not asked.tools:
            return choice.text
        whole, choice.message, calls = read_calls(asked.opening, choice.text, choice.stream.stopped_by)
        # ids that are the same in every repetition, since a template may show them
        head = f"call_{answer.works[0].request.seeds_G[choice.index]:016x}"
        choice.calls = [
            {"id": f"{head}_{i}", "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for i, each in enumerate(calls)
        ]
        if calls and choice.reason == "stop":
            choice.reason = "tool_calls"
        return whole

    def _require_ranking(self, asked: Asked) -> None:
        if asked.is_ranked and not self._batcher.can_rank:
            message = "this backend reports log-probabilities of sampled tokens only, without alternatives"
            raise RequestError(message, param="logprobs", code="unsupported_value")

    def _submit(self, answer: Answer, works: Sequence[Work]) -> None:
        try:
            for work in works:
                self._batcher.submit(work)
        except BusyError:
            self.cancel(answer)
            message = "too many completions are under way; try again later"
            raise RequestError(message, status=429, code="rate_limit_exceeded") from None

    def texts(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token; together they are the whole text."""
        with self._tokenizer_lock:
            return token_texts(self._tokenizer, tokens)

    def text_of(self, token: int) -> str:
        with self._tokenizer_lock:
            return str(self._tokenizer.decode([token]))

    def _take(self, work: Generation, choice: Choice, piece: Piece) -> tuple[Choice, str, slice]:
        before, text = len(choice.tokens), ""
        with self._tokenizer_lock:
            choice.pieces.append(piece.sample)
            for token, logprob in zip(piece.sample.tokens_T.tolist(), piece.sample.logprobs_T.tolist(), strict=True):
                choice.tokens.append(token)
                choice.logprobs.append(logprob)
                text += choice.stream.add(token)
                if choice.stream.is_stopped:
                    work.ended.add(piece.place)
                    choice.reason = "stop"
                    break
            if choice.reason is None and piece.reason is not None:
                text += choice.stream.finish()
                is_stop = choice.stream.is_stopped or piece.reason is StopReason.EOS
                choice.reason = "stop" if is_stop else "length"
        return choice, text, slice(before, len(choice.tokens))

    async def _rank(self, answer: Answer) -> None:
        wholes = [np.concatenate([c.prompt_T, np.asarray(c.tokens, dtype=np.int64)]) for c in answer.choices]
        rows = [LogprobRow.of(whole_T[:1], whole_T[1:]) for whole_T in wholes]
        work = Ranking(
            model=answer.model,
            temperature=answer.temperature,
            events=answer.events,
            rows=rows,
            top=answer.asked.top or 0,
        )
        self._submit(answer, [work])
        try:
            while True:
                source, event = await _next(answer.events)
                if source is work and isinstance(event, list):
                    break
        finally:
            work.is_cancelled = True
        for choice, tops in zip(answer.choices, event, strict=True):
            choice.tops = tops

    def _checked(self, ids: Sequence[int], param: str) -> Tokens:
        if not ids or (self.limit is not None and len(ids) >= self.limit):
            reads = f", and the model reads {self.limit} with its answer" if self.limit else ""
            message = f"the {param} has {len(ids)} tokens{reads}"
            raise RequestError(message, param=param, code="context_length_exceeded")
        return np.asarray(ids, dtype=np.int64)


class Service(Answers):
    """Answers requests about the models of a server.

    `models` maps names to checkpoints, None for the base; a request without a name means the first.
    """

    def __init__(self, source: Opened, models: Mapping[str, Path | None], batcher: Batcher) -> None:
        limit = context_length(source.config, source.plugins)
        super().__init__(source.tokenizer, batcher, models=models, limit=limit, lock=threading.Lock())
        self._source = source
        self._template_args = template_args(source.config, source.tokenizer)

    def start(self, asked: Asked, events: Inbox, *, is_chat: bool, is_retry: bool = False) -> Answer:
        model = asked.model or next(iter(self.models))
        if model not in self.models:
            known = ", ".join(self.models)
            message = f"the model {model[:200]!r} does not exist; there are: {known}"
            raise RequestError(message, param="model", status=404, code="model_not_found")
        self._require_ranking(asked)
        with self._tokenizer_lock:
            prompts = [self._chat(asked)] if is_chat else [self._prompt(prompt) for prompt in asked.prompts]
        training = self._source.config.training
        wanted = training.temperature if asked.temperature is None else asked.temperature
        seed = secrets.randbits(31) if asked.seed is None else asked.seed
        answer = self._new_answer(
            asked,
            events,
            prompts,
            lambda number, place: sample_seed(seed, number, place),
            is_chat=is_chat,
            model=model,
            temperature=wanted or GREEDY_TEMPERATURE,
            max_tokens=training.max_tokens if asked.max_tokens is None else asked.max_tokens,
            greedy=wanted == 0.0,
        )
        self._submit(answer, answer.works)
        return answer

    def finish(self, answer: Answer) -> None:
        for choice in answer.choices if answer.is_chat else ():
            self._read_tools(answer, choice)

    def _chat(self, asked: Asked) -> tuple[str, Tokens]:
        text = self._rendered(asked.messages, asked, self._template_args)
        # A chat template writes its special tokens itself.
        special = not self._tokenizer.chat_template
        return "", self._encoded(text, "messages", special=special)

    def _prompt(self, prompt: str | list[int]) -> tuple[str, Tokens]:
        if isinstance(prompt, str):
            return prompt, self._encoded(prompt, "prompt", special=True)
        if max(prompt) >= len(self._tokenizer) or min(prompt) < 0:
            raise RequestError(f"token ids go from 0 to {len(self._tokenizer) - 1}", param="prompt")
        return str(self._tokenizer.decode(prompt)), self._checked(prompt, "prompt")

    def _encoded(self, text: str, param: str, *, special: bool) -> Tokens:
        try:
            ids = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        except Exception as error:  # each tokenizer library has its own error for half a surrogate pair
            raise RequestError(f"the tokenizer refuses the {param}: {type(error).__name__}", param=param) from None
        return self._checked(ids, param)


async def _next(events: Inbox) -> tuple[Work, Piece | list[TopLogprobs]]:
    work, event = await events.next()
    if isinstance(event, Failure):
        raise RequestError(event.message, status=503 if event.is_stopping else 500)
    return work, event


def top_dict(service: Answers, choice: Choice, place: int) -> dict[str, float] | None:
    """Return the likeliest tokens at a place of prompt and completion, by text; of equal texts the likelier counts."""
    tops = choice.tops
    if tops is None or place == 0:
        return None
    found: dict[str, float] = {}
    for token, logprob in zip(tops.top_ids_TK[place].tolist(), tops.top_logprobs_TK[place].tolist(), strict=True):
        found.setdefault(service.text_of(token), max(logprob, LEAST))
    return found


def kept_tokens(choice: Choice, texts: Sequence[str]) -> int:
    """Count the tokens of a completion that belong to its text: they begin before a stop."""
    if not choice.stream.is_stopped:
        return len(texts)
    starts = accumulate(map(len, texts), initial=0)
    return sum(start < len(choice.text) for start in [*starts][:-1])


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return role, text, name and tool calls of a message, with arguments as objects, as templates expect."""
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
    """Return the policy's whole answer, with its opening and the end of its one call; its message; its calls.

    If the opening begins a call and the policy writes a whole one after it, the policy's counts.
    """
    ending = CALL_END if stopped_by == CALL_END else ""
    whole = f"{opening}{text}{ending}"
    message, calls = parse_tool_calls(whole)
    if opening and not calls:
        message, calls = parse_tool_calls(text + ending)
    return whole, message if calls else whole, calls
