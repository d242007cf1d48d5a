"""Environment `{{ cookiecutter.name }}`: guess a number from hints within a few turns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from retrain.api import (
    Action,
    ConfigError,
    EpisodeResult,
    Example,
    LoadedData,
    Message,
    Observation,
    Outcome,
    PluginContext,
    Problem,
    Score,
)

DEFAULT_TURNS = 6
FOUND_WEIGHT, SPEED_WEIGHT = 0.7, 0.3
BOX = re.compile(r"\\boxed\s*\{([^{}]*)\}")
MAX_DIGITS = 9


class Arguments(BaseModel):
    """`[environment] args`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    highest: int = Field(default=20, ge=2, le=1_000_000)
    tasks: int = Field(default=20, ge=1, le=100_000)


@dataclass(slots=True)
class Game:
    """One episode: the number to find, and the conversation so far."""

    secret: int
    messages: list[Message]
    turns: int = 0
    was_found: bool = False


@dataclass(slots=True)
class GuessNumber:
    """Many games in parallel. It holds plain data only, because it is pickled and sent to its own process."""

    arguments: Arguments
    max_turns: int
    games: list[Game] = field(default_factory=list)

    def load(self) -> LoadedData:
        """One task per number, spread over the whole range."""
        highest = self.arguments.highest
        count = min(self.arguments.tasks, highest)
        secrets = [1 + index * highest // count for index in range(count)]
        return LoadedData(examples=tuple(self._example(secret) for secret in secrets))

    def reset(self, examples: Sequence[Example]) -> Mapping[int, Observation]:
        """Start one game per example; unfinished games are dropped."""
        self.games = [Game(int(example.reference), _opening(example)) for example in examples]
        return self.step({})

    def step(self, actions: Mapping[int, Action]) -> Mapping[int, Observation]:
        """Answer every guess with a hint; returns the conversation of each unfinished game."""
        for number, action in actions.items():
            self._answer(self.games[number], action.text)
        open_games = [number for number, game in enumerate(self.games) if self._is_open(game)]
        return {number: Observation(prompt=tuple(self.games[number].messages)) for number in open_games}

    def results(self) -> Sequence[EpisodeResult]:
        """Score every game, in order."""
        return [EpisodeResult(score=self._score(game), hit_turn_limit=not game.was_found) for game in self.games]

    def _answer(self, game: Game, text: str) -> None:
        game.turns += 1
        guess = _guess(text)
        game.was_found = guess == game.secret
        if guess is None:
            hint = "There was no number in a box. Guess again."
        else:
            hint = f"The number is {'higher' if guess < game.secret else 'lower'} than {guess}. Guess again."
        game.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": hint}]

    def _is_open(self, game: Game) -> bool:
        return not game.was_found and game.turns < self.max_turns

    def _score(self, game: Game) -> Score:
        found = float(game.was_found)
        speed = found * (self.max_turns - game.turns) / self.max_turns
        value = FOUND_WEIGHT * found + SPEED_WEIGHT * speed
        return Score(outcome=Outcome.SCORED, value=value, parts={"found": found, "speed": speed})

    def _example(self, secret: int) -> Example:
        highest = self.arguments.highest
        question = f"I think of a whole number from 1 to {highest}. " + r"Put your guess in \boxed{}."
        # The id distinguishes the tasks: all prompts are alike.
        return Example(
            id=f"{{ cookiecutter.name }}-{highest}-{secret}",
            prompt=({"role": "user", "content": question},),
            reference=str(secret),
            task="{{ cookiecutter.name }}",
        )


def create(context: PluginContext) -> GuessNumber:
    """The environment that `[environment] args` and `max_turns` describe; ConfigError for unknown arguments."""
    config = context.config
    try:
        arguments = Arguments.model_validate(config.value("environment.args", {}))
    except ValidationError as error:
        where = config.place("environment.args")
        known = ", ".join(Arguments.model_fields)
        problems = [
            Problem(where=f"{where}.{'.'.join(map(str, fault['loc']))}", what=fault["msg"], fix=f"known: {known}")
            for fault in error.errors()
        ]
        raise ConfigError(*problems) from None
    turns = int(config.value("environment.max_turns", -1))
    return GuessNumber(arguments, turns if turns > 0 else DEFAULT_TURNS)


def _guess(text: str) -> int | None:
    """Return the number in the last box; None without a box."""
    boxes = BOX.findall(text)
    content = boxes[-1].strip() if boxes else ""
    return int(content) if content.isascii() and content.isdigit() and len(content) <= MAX_DIGITS else None


def _opening(example: Example) -> list[Message]:
    if isinstance(example.prompt, str):
        return [{"role": "user", "content": example.prompt}]
    return list(example.prompt)
