"""The policy gateway: an OpenAI-compatible endpoint on loopback, where the key says whose call it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from retrain.use.agents.episode import Episode
from retrain.use.serving.http import ApiServer


class Gateway(ApiServer):
    """Serves until `close`; only the episodes that are `admitted` are answered."""

    def __init__(self) -> None:
        self._episodes: dict[str, Episode] = {}
        refusal = "this key is of no episode that is being played"
        super().__init__("127.0.0.1", 0, lambda key: self._episodes.get(key), refusal=refusal)
        self.start()

    @contextmanager
    def admitted(self, episodes: Sequence[Episode]) -> Iterator[None]:
        """Within the block the keys of these episodes are known."""
        self._episodes = {episode.token: episode for episode in episodes}
        try:
            yield
        finally:
            self._episodes = {}
