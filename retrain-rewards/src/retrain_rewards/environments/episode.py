"""One episode: the environment's coroutine on one side, observations and actions of the policy on the other."""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from retrain.api import (
    Action,
    Example,
    Message,
    Observation,
    Outcome,
    Score,
    StopReason,
    parse_tool_calls,
)
from retrain_rewards.environments.messages import plain_messages

MODEL = "policy"  # the name under which environments know the model


class TurnLimitError(RuntimeError):
    """The environment asks for a turn that the episode no longer has."""


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
        """The environment is done with it."""
        return self.dropped or (self.task is not None and self.task.done())

    @property
    def is_at_work(self) -> bool:
        """Started, and neither over nor waiting for the policy."""
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

    async def complete(self, prompt: str | Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> dict[str, Any]:
        """The policy's answer to a prompt, as an OpenAI chat completion; messages and tools are OpenAI's too.

        TurnLimitError when that would be one turn too many.
        """
        if self.dropped:
            raise asyncio.CancelledError
        if self.max_turns is not None and self.turns >= self.max_turns:
            self.hit_turn_limit = True
            raise TurnLimitError(f"max_turns = {self.max_turns} turns are played")
        schemas = [json.loads(json.dumps(tool)) for tool in tools or ()]
        text = prompt if isinstance(prompt, str) else self._quoted(prompt)
        future: asyncio.Future[Action] = asyncio.get_running_loop().create_future()
        self._calls.append((Observation(prompt=text, tools=schemas), future))
        self.changed()
        action = await future
        self.turns += 1
        return self._completion(action, bool(schemas))

    def _completion(self, action: Action, has_tools: bool) -> dict[str, Any]:
        content, calls = parse_tool_calls(action.text) if has_tools else (action.text, ())
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
        """The conversation with the policy's own tool calls as it wrote them.

        The next prompt then holds the sampled text word for word, whatever the chat template makes of `tool_calls`. A
        message that the environment has altered is passed on as it is.
        """
        said = []
        for message in plain_messages(prompt):
            text = self._quotes.get(_mark(message)) if "tool_calls" in message else None
            said.append(message if text is None else {"role": "assistant", "content": text})
        return said


def _mark(message: Message) -> str:
    return json.dumps([message["content"], message["tool_calls"]], sort_keys=True)


def score_of(value: Any, parts: Mapping[str, Any]) -> Score:
    """The library's reward and its finite parts as a score; failed unless the reward is a finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return Score.failed(f"the reward is {value!r}, not a number")
    if not math.isfinite(number):
        return Score.failed(f"the reward is {number}, not a finite number")
    kept = {str(name): float(part) for name, part in parts.items() if isinstance(part, (int, float))}
    finite = {name: part for name, part in kept.items() if math.isfinite(part)}
    return Score(outcome=Outcome.SCORED, value=number, parts=finite)
