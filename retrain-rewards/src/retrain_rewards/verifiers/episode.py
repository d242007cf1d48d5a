"""One episode as seen from the policy's side: what it asks, what it was told, how it went."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from retrain.api import Ask, Example, Message, Reply, Score, StopReason
from retrain_rewards.verifiers.messages import plain_messages
from retrain_rewards.verifiers.tool_calls import ToolCall, parse_tool_calls

MODEL = "policy"  # the name under which environments know the model


class TurnLimitError(RuntimeError):
    """The environment asks for a turn that the episode no longer has."""


@dataclass(slots=True, kw_only=True, eq=False)
class Episode:
    """One rollout of one example: the environment's coroutine on one side, the policy's replies on the other.

    The environment calls `complete` and is suspended there until `answer` is called. `task` runs the environment's
    own loop. `failure` says why there can be no score; `score` is set by whoever scores.
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
    result: Any = None
    dropped: bool = False
    _calls: deque[tuple[Ask, asyncio.Future[Reply]]] = field(default_factory=deque)
    _quotes: dict[str, str] = field(default_factory=dict)

    @property
    def asks(self) -> Ask | None:
        """What it waits to be told, the oldest first; None when it is at work or over."""
        return self._calls[0][0] if self._calls and not self.is_over else None

    @property
    def is_over(self) -> bool:
        """The environment is done with it."""
        return self.dropped or (self.task is not None and self.task.done())

    @property
    def is_busy(self) -> bool:
        """Neither over nor waiting for the policy."""
        return not self.is_over and not self._calls

    def answer(self, reply: Reply) -> None:
        """Hand the policy's reply to the environment; ValueError when it asked nothing."""
        if self.asks is None:
            raise ValueError(f"episode {self.number} asked nothing, so there is nothing to reply to")
        _, future = self._calls.popleft()
        if not future.done():
            future.set_result(reply)

    def close(self) -> None:
        """Give no further turns: whatever the environment asks is refused, and it ends as at its turn limit."""
        self.max_turns = self.turns
        while self._calls:
            _, future = self._calls.popleft()
            if not future.done():
                self.hit_turn_limit = True
                future.set_exception(TurnLimitError("no further turn is given"))

    async def complete(self, prompt: str | Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> dict[str, Any]:
        """What the policy says to this, in the form of an OpenAI chat completion.

        TurnLimitError when that would be one turn too many; a chat's messages are OpenAI's, as are the tools.
        """
        if self.dropped:
            raise asyncio.CancelledError
        if self.max_turns is not None and self.turns >= self.max_turns:
            self.hit_turn_limit = True
            raise TurnLimitError(f"max_turns = {self.max_turns} turns are played")
        schemas = [json.loads(json.dumps(tool)) for tool in tools or ()]
        text = prompt if isinstance(prompt, str) else self._quoted(prompt)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls.append((Ask(prompt=text, tools=schemas), future))
        self.changed()
        reply = await future
        self.turns += 1
        return self._completion(reply, bool(schemas))

    def _completion(self, reply: Reply, has_tools: bool) -> dict[str, Any]:
        content, calls = parse_tool_calls(reply.text) if has_tools else (reply.text, ())
        message: dict[str, Any] = {"role": "assistant", "content": content}
        reason = "stop"
        if calls:
            message["tool_calls"] = [self._wire(call, place) for place, call in enumerate(calls)]
            self._quotes[_mark(plain_messages([message])[0])] = reply.text
            reason = "tool_calls"
        if reply.stop_reason is StopReason.LENGTH:
            reason = "length"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        name = f"{self.number}-{self.turns}"
        return {"id": name, "object": "chat.completion", "created": 0, "model": MODEL, "choices": [choice]}

    def _wire(self, call: ToolCall, place: int) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"call_{self.turns}_{place}", "type": "function", "function": function}

    def _quoted(self, prompt: Sequence[Mapping[str, Any]]) -> list[Message]:
        """The conversation with the policy's own calls as it wrote them.

        What was sampled is then found again word for word in the next prompt, whatever the chat template makes of
        `tool_calls`. A message that the environment has altered is passed on as it is.
        """
        said = []
        for message in plain_messages(prompt):
            text = self._quotes.get(_mark(message)) if "tool_calls" in message else None
            said.append(message if text is None else {"role": "assistant", "content": text})
        return said


def _mark(message: Message) -> str:
    return json.dumps([message["content"], message["tool_calls"]], sort_keys=True)
