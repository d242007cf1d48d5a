"""What a soaked run brings along: a reward, a game and an agent, which break when a file in the run's folder says so.

The file is copied beside each run and imports nothing of the tests.
"""

from __future__ import annotations

import json
import math
import os
import time
import urllib.request
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retrain.api import Action, EpisodeResult, Example, LoadedData, Observation, Score

TROUBLE = Path("trouble")  # `raises`, `nan`, `exits` or `hangs`; `once ...`: whoever sees it first, and nobody else
ONCE = "once "


def trouble() -> str:
    """What is to go wrong now; a trouble that comes once is taken by the process that moves its file away."""
    try:
        told = TROUBLE.read_text(encoding="utf-8")
        if told.startswith(ONCE):
            TROUBLE.rename(f"{TROUBLE}.taken")
    except FileNotFoundError:
        return ""
    return told.removeprefix(ONCE)


def suffer(name: str) -> float | None:
    """Go wrong; NaN where that is all."""
    if name == "exits":
        os._exit(3)
    if name == "hangs":
        time.sleep(1e6)
    if name == "raises":
        raise RuntimeError("the verifier is down")
    return math.nan if name == "nan" else None


class Reward:
    """Sums that end in their reference; a third of the rows is right and a third wrong whatever is answered."""

    def __init__(self, context: object) -> None:
        """Nothing is kept."""

    def score(self, example: Example, text: str) -> float:
        """1 for the right answer. One text in eight hangs, so that a step of them ends in seconds."""
        name = trouble()
        is_spared = name == "hangs" and zlib.crc32(text.encode()) % 8 != 0
        if not is_spared and (told := suffer(name)) is not None:
            return told
        if example.reference in ("any", "never"):
            return float(example.reference == "any")
        return float(text.strip().rstrip(".}$ ").endswith(example.reference))


class Shadow(Reward):
    """A stricter verifier: the answer is boxed."""

    def score(self, example: Example, text: str) -> float:
        """1 for the right answer in a box."""
        return float(f"boxed{{{example.reference}}}" in text)


class Recorder:
    """A board that is down; whoever trains goes on without it."""

    def __init__(self, context: object) -> None:
        """Nothing is kept."""

    def start(self, manifest: object, folder: object) -> None:
        """Still well."""

    def step(self, metrics: object) -> None:
        raise RuntimeError("the board is down")

    def finish(self, error: object = None) -> None:
        raise RuntimeError("the board is still down")


class Game:
    """Sums in two turns: an answer, and another one after a hint."""

    def __init__(self, context: object = None) -> None:
        self.examples: list[Example] = []
        self.said: dict[int, list[str]] = {}

    def load(self) -> LoadedData:
        pairs = [(a, b) for a in range(2, 10) for b in range(2, 8)]
        examples = [Example(id=f"{a}+{b}", prompt=f"What is {a} + {b}?", reference=str(a + b)) for a, b in pairs]
        return LoadedData(examples=tuple(examples))

    def reset(self, examples: Sequence[Example]) -> Mapping[int, Observation]:
        self.examples, self.said = list(examples), {number: [] for number in range(len(examples))}
        return self.step({})

    def step(self, actions: Mapping[int, Action]) -> Mapping[int, Observation]:
        suffer(trouble())
        for number, action in actions.items():
            self.said[number].append(action.text)
        return {number: Observation(prompt=self._chat(number)) for number, said in self.said.items() if len(said) < 2}

    def results(self) -> Sequence[EpisodeResult]:
        ended = enumerate(self.examples)
        return [EpisodeResult(score=Score.of(self._rights(n, example.reference) / 2)) for n, example in ended]

    def _rights(self, number: int, reference: str) -> int:
        return sum(reference in said for said in self.said[number])

    def _chat(self, number: int) -> list[dict[str, str]]:
        chat = [{"role": "user", "content": str(self.examples[number].prompt)}]
        for said in self.said[number]:
            chat += [{"role": "assistant", "content": said}, {"role": "user", "content": "Are you sure?"}]
        return chat


def play(task: Mapping[str, Any]) -> str:
    """An agent of the standard library: it asks twice, one call after the other."""
    suffer(trouble())
    chat = list(task["messages"])
    said = _ask(chat)
    return _ask([*chat, {"role": "assistant", "content": said}, {"role": "user", "content": "Are you sure?"}])


def _ask(chat: list[dict[str, str]]) -> str:
    body = json.dumps({"model": "any", "messages": chat}).encode()
    head = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", data=body, headers=head)
    with urllib.request.urlopen(request) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])
