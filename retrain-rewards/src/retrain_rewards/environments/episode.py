"""One episode and its chat messages: the environment's coroutine on one side, the policy's actions on the other."""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from retrain.api import Action, Example, Message, Observation, Outcome, Score, StopReason, parse_tool_calls

MODEL = "policy"  # the name under which environments know the model


class TurnLimitError(RuntimeError):
    """The environment wants a turn that the episode no longer has."""


@dataclass(slots=True, kw_only=True, eq=False)
class Episode:
    """One rollout of one example.

    The environment calls `complete` and is suspended there until `act` is called. `task` runs the environment's own
    loop. `failure` says why there can be no score; `score` is set by whoever scores.
    """

    number: int
    example: Example
    max_turns: int | None = None
    changed: Callable[[], None] = lambda: None
    task: asyncio.Task[None] | None = None
    turns: int = 0
    hit_turn_limit: bool = False
    failure: str = ""
    score: Score | None = None
    turn_rewards: tuple[float, ...] = ()
    result: Any = None
    dropped: bool = False
    _calls: deque[tuple[Observation, asyncio.Future[Action]]] = field(default_factory=deque)
    _quotes: dict[str, str] = field(default_factory=dict)

    @property
    def observation(self) -> Observation | None:
        """The oldest call that waits for the policy; None when the episode is at work or over."""
        return self._calls[0][0] if self._calls and not self.is_over else None

    @property
    def is_over(self) -> bool:
        return self.dropped or (self.task is not None and self.task.done())

    @property
    def is_at_work(self) -> bool:
        return self.task is not None and not self.is_over and not self._calls

    def act(self, action: Action) -> None:
        """Hand the policy's action to the environment; ValueError when the episode does not wait for one."""
        if self.observation is None:
            raise ValueError(f"episode {self.number} does not wait for an action")
        _, future = self._calls.popleft()
        if not future.done():
            future.set_result(action)

    def close(self) -> None:
        """Refuse every further call of the environment, so that the episode ends as at its turn limit."""
        self.max_turns = self.turns
        while self._calls:
            _, future = self._calls.popleft()
            if not future.done():
                self.hit_turn_limit = True
                future.set_exception(TurnLimitError("no further turn is given"))

    async def complete(
        self, prompt: str | Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, state: Any = None
    ) -> dict[str, Any]:
        """Return the policy's answer as an OpenAI chat completion; TurnLimitError for one turn too many."""
        if self.dropped:
            raise asyncio.CancelledError
        if self.max_turns is not None and self.turns >= self.max_turns:
            self.hit_turn_limit = True
            raise TurnLimitError(f"max_turns = {self.max_turns} turns are played")
        # Plain copies: the observation crosses a process boundary, and some libraries pass their own classes.
        schemas = [json.loads(json.dumps(tool)) for tool in tools or ()]
        text = prompt if isinstance(prompt, str) else self._quoted(prompt)
        future: asyncio.Future[Action] = asyncio.get_running_loop().create_future()
        self._calls.append((Observation(prompt=text, tools=schemas, info={"state_key": state}), future))
        self.changed()
        action = await future
        self.turns += 1
        content, calls = parse_tool_calls(action.text) if bool(schemas) else (action.text, ())
        message: dict[str, Any] = {"role": "assistant", "content": content}
        reason = "stop"
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{self.turns}_{place}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for place, call in enumerate(calls)
            ]
            self._quotes[_mark(plain_messages([message])[0])] = action.text
            reason = "tool_calls"
        if action.stop_reason is StopReason.LENGTH:
            reason = "length"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        name = f"{self.number}-{self.turns}"
        return {"id": name, "object": "chat.completion", "created": 0, "model": MODEL, "choices": [choice]}

    def _quoted(self, prompt: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Return the conversation with the policy's own tool calls as it wrote them.

        The next prompt then holds the sampled text word for word, whatever the chat template makes of `tool_calls`. A
        message that the environment has altered is passed on unchanged.
        """
        said = []
        for message in plain_messages(prompt):
            text = self._quotes.get(_mark(message)) if "tool_calls" in message else None
            said.append(message if text is None else {"role": "assistant", "content": text})
        return said


def _mark(message: Message) -> str:
    return json.dumps([message["content"], message["tool_calls"]], sort_keys=True)


def score_of(value: Any, parts: Mapping[str, Any]) -> Score:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return Score.failed(f"the reward is {value!r}, not a number")
    if not math.isfinite(number):
        return Score.failed(f"the reward is {number}, not a finite number")
    kept = {str(name): float(part) for name, part in parts.items() if isinstance(part, (int, float))}
    finite = {name: part for name, part in kept.items() if math.isfinite(part)}
    return Score(outcome=Outcome.SCORED, value=number, parts=finite)


class UnsupportedContentError(ValueError): ...


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages as plain data, arguments of tool calls as objects; UnsupportedContentError on images."""
    found: list[Message] = []
    for message in messages:
        plain: dict[str, Any] = {"role": str(message.get("role") or "user"), "content": text_of(message.get("content"))}
        if message.get("tool_calls"):
            plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
        plain |= {name: message[name] for name in ("tool_call_id", "name") if isinstance(message.get(name), str)}
        found.append(plain)
    return found


def plain_data(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def text_of(content: Any) -> str:
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


# Characters; a shorter special token is ordinary text, such as a line break.
SHORTEST_TOKEN = 3
_CONTROLS = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaner:
    """Cleans an untrusted text before the policy sees it.

    `special` are the tokenizer's special tokens: one of them in a result would end its message. A space after its first
    character makes it plain text. `max_chars` limits the length.
    """

    special: tuple[str, ...]
    max_chars: int

    @classmethod
    def of(cls, tokenizer: Any, max_chars: int) -> Cleaner:
        tokens: Sequence[str] = getattr(tokenizer, "all_special_tokens", ())
        found = {str(token) for token in tokens if len(str(token)) >= SHORTEST_TOKEN}
        # Longest first: one token may begin another.
        return cls(special=tuple(sorted(found, key=len, reverse=True)), max_chars=max_chars)

    def __call__(self, text: str) -> str:
        """Remove control characters and special tokens, and cut the text with a note of how much is missing."""
        left_out = len(text) - self.max_chars
        if left_out > 0:
            text = f"{text[: self.max_chars]}\n[{left_out} more characters]"
        # Lone surrogates cannot be tokenized.
        text = text.encode("utf-8", "replace").decode("utf-8").translate(_CONTROLS)
        for token in self.special:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text
