"""Hooks into the classic library: a client that calls the run's policy, and failures of reward functions.

The library catches every exception of a reward function, logs it and scores 0.0. Here its two methods that call reward
functions are wrapped, so that exceptions are kept with their state: a reward of 0 is no failure.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any

from verifiers.legacy.clients.openai_chat_completions_client import OpenAIChatCompletionsClient, OpenAIChatResponse
from verifiers.legacy.rubrics.rubric import Rubric

from retrain_rewards.environments.episode import Episode, text_of
from retrain_rewards.environments.loop import reason_of

# In the library's state of an episode: failures that make its score one, and names of metrics without a value
FAILURES, MISSING = "retrain_failures", "retrain_missing"
# Log messages of the library's mathematical rubric when its verifier, not the answer, is at fault; it then scores 0.0.
BROKEN = ("Math verification failed", "Math verification hit hard timeout")
State = MutableMapping[str, Any]  # the library's, of one episode
_scored: ContextVar[tuple[State, ...]] = ContextVar("_scored", default=())


def watch_reward_functions() -> None:
    if hasattr(Rubric, "_retrain_watched"):
        return
    of_one, of_group = Rubric._call_individual_reward_func, Rubric._call_group_reward_func

    async def call_one(self: Any, func: Callable[..., Any], state: State) -> Any:
        value = await _called(of_one, self, func, float, [state], state)
        return _finite(self, func, state, value)

    async def call_group(self: Any, func: Callable[..., Any], states: Sequence[State]) -> Any:
        values = await _called(of_group, self, func, list, states, states)
        if len(values) != len(states):
            raise ValueError(f"{_name(func)} returned {len(values)} values for {len(states)} episodes")
        return [_finite(self, func, state, value) for state, value in zip(states, values, strict=True)]

    Rubric._call_individual_reward_func, Rubric._call_group_reward_func = call_one, call_group
    Rubric._retrain_watched = True
    logging.getLogger("verifiers.legacy.rubrics").addHandler(_BrokenVerifier())


async def _called(
    original: Callable[..., Any],
    rubric: Any,
    func: Callable[..., Any],
    convert: Callable[[Any], Any],
    states: Sequence[State],
    argument: Any,
) -> Any:
    """Call a reward function as the library does, and record exceptions of it and of `convert`."""

    @functools.wraps(func)  # the library looks at its name and signature
    async def kept(*args: Any, **kwargs: Any) -> Any:
        try:
            result = func(*args, **kwargs)
            return convert(await result if inspect.isawaitable(result) else result)
        except Exception as error:
            _fail(rubric, func, states, f"raised {reason_of(error)}")
            raise

    token = _scored.set(tuple(states))
    try:
        return await original(rubric, kept, argument)
    finally:
        _scored.reset(token)


def _finite(rubric: Any, func: Callable[..., Any], state: State, value: float) -> float:
    if math.isfinite(value):
        return value
    _fail(rubric, func, [state], f"returned {value}")
    # The library multiplies by the weight, and 0 * nan would spoil the sum.
    return 0.0


def _fail(rubric: Any, func: Callable[..., Any], states: Sequence[State], failure: str) -> None:
    weights = [weight for each, weight in zip(rubric.funcs, rubric.weights, strict=True) if each is func]
    for state in states:
        if any(weights) or not weights:
            _note([state], f"{_name(func)} {failure}")
        else:
            state.setdefault(MISSING, []).append(_name(func))


def _note(states: Sequence[State], failure: str) -> None:
    for state in states:
        state.setdefault(FAILURES, []).append(failure)


def _name(func: Callable[..., Any]) -> str:
    return str(getattr(func, "__name__", repr(func)))


class _BrokenVerifier(logging.Handler):
    """Finds failures that the library only reports in its log."""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith(BROKEN):
            _note(_scored.get(), message.splitlines()[0][:300])


class PolicyClient(OpenAIChatCompletionsClient):  # type: ignore[misc]  # the library has no stubs
    """The library's own chat client, with its conversion of messages and tools, but without a request."""

    def __init__(self, episode: Episode) -> None:
        super().__init__(None)
        self._episode = episode

    async def to_native_prompt(self, messages: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        if messages and messages[0].role == "text":
            return "\n\n".join(text_of(message.content) for message in messages), {}
        native, extra = await super().to_native_prompt(messages)
        return native, extra

    async def get_native_response(
        self,
        prompt: Any,
        model: str,
        sampling_args: Mapping[str, Any],
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the policy's answer; `sampling_args` are ignored, since the run decides how to sample."""
        return OpenAIChatResponse.model_validate(await self._episode.complete(prompt, tools))

    async def raise_from_native_response(self, response: Any) -> None:
        """Raise nothing: an empty answer is an answer, and the rubric scores it."""

    async def from_native_response(self, response: Any) -> Any:
        answer = await super().from_native_response(response)
        if answer.message.content is None:
            answer.message.content = ""
        return answer

    async def close(self) -> None: ...
