"""The policy gateway: an OpenAI-compatible endpoint on loopback, where the key says whose call it is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from retrain.use.agents.episode import Episode
from retrain.use.serving.http import HttpServer
from retrain.use.serving.service import Answers

LOOPBACK = "127.0.0.1"
POLL_S = 0.05  # until `close` is noticed


class Gateway(HttpServer):
    """Serves until `close`; only the episodes that are `admitted` are answered."""

    log_level = logging.DEBUG
    refusal = "this key is of no episode that is being played"

    def __init__(self) -> None:
        super().__init__((LOOPBACK, 0))
        self._episodes: dict[str, Episode] = {}
        self._thread = threading.Thread(target=self.serve_forever, args=(POLL_S,), name="policy gateway", daemon=True)
        self._thread.start()

    def service_of(self, token: str) -> Answers | None:
        """The episode with this key."""
        return self._episodes.get(token)

    @contextmanager
    def admitted(self, episodes: Sequence[Episode]) -> Iterator[None]:
        """Within the block the keys of these episodes are known."""
        self._episodes = {episode.token: episode for episode in episodes}
        try:
            yield
        finally:
            self._episodes = {}

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self._thread.join()
        self.server_close()
