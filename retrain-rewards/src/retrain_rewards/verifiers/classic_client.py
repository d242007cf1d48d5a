"""A client of the classic library that gets its answers from the run's policy instead of a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.legacy.clients.openai_chat_completions_client import OpenAIChatCompletionsClient, OpenAIChatResponse

from retrain_rewards.episodes.episode import Episode
from retrain_rewards.episodes.messages import text_of


class PolicyClient(OpenAIChatCompletionsClient):  # type: ignore[misc]  # the library has no stubs
    """The library's own chat client, with its conversion of messages and tools, but without a request."""

    def __init__(self, episode: Episode) -> None:
        super().__init__(None)
        self._episode = episode

    async def to_native_prompt(self, messages: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        """OpenAI messages, or plain text for an environment of completions without a chat."""
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
        """The policy's answer; `sampling_args` are ignored, since the run decides how to sample."""
        return OpenAIChatResponse.model_validate(await self._episode.complete(prompt, tools))

    async def raise_from_native_response(self, response: Any) -> None:
        """Nothing to raise: an empty answer is an answer, which the rubric scores."""

    async def from_native_response(self, response: Any) -> Any:
        """The library's message, with an empty text where it would have none."""
        answer = await super().from_native_response(response)
        if answer.message.content is None:
            answer.message.content = ""
        return answer

    async def close(self) -> None:
        """Nothing is open."""
