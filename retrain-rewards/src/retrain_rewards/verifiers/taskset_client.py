"""A client of the v1 library that gets its answers from the run's policy instead of a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verifiers.v1.clients import Client

from retrain_rewards.episodes.episode import Episode, TurnLimitError


class PolicyClient(Client):  # type: ignore[misc]  # the library has no stubs
    """Answers the chat completions of all episodes; `playing` finds the episode by the id of its trace."""

    def __init__(self, playing: Callable[[str], tuple[Episode, Any]]) -> None:
        self._playing = playing

    async def get_response(
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The policy's answer to a native request, in the form of a server's response."""
        episode, trace = self._playing(session_id or "")
        try:
            raw = await episode.complete(body.get("messages") or [], body.get("tools"))
        except TurnLimitError:
            trace.stop("max_turns")  # so that the library sees an end, not a failure
            raise
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response
