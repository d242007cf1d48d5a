"""The game of `openenv_server.py` as an environment of the real package: `python openenv_game.py PORT SESSIONS`."""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    """A number."""

    number: int


class Hint(Observation):
    """Where the secret is."""

    hint: str = ""


class Game(Environment):
    """Guess a number from 100 to 140; 99 breaks the game."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.secret = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Hint:
        self.secret = random.Random(seed).randint(100, 140)
        return Hint(hint="Guess my number, 100 to 140.")

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Hint:
        if action.number == 99:
            raise ValueError("boom")
        found = action.number == self.secret
        hint = "right" if found else "higher" if self.secret > action.number else "lower"
        return Hint(hint=hint, done=found, reward=float(found))

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
