"""Classic, several turns: guess a number from 1 to 9, told "too low" or "too high" after each wrong guess.

These are the very words that `builtin:tiny` was pretrained on, so it can play from the start, and learn to play well.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import verifiers as vf
from datasets import Dataset

QUESTION = "I think of a number from 1 to 9. Guess it."
_BOX = re.compile(r"\\boxed\{\s*(\d+)\s*\}")


class GuessNumber(vf.MultiTurnEnv):  # type: ignore[misc]
    pays_turns = False

    @vf.stop
    async def guessed(self, state: Any) -> bool:
        return guess_in(state["trajectory"][-1]["completion"]) == int(state["answer"]) if state["trajectory"] else False

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        guess = guess_in(messages[-1:])
        if self.pays_turns:
            state["trajectory"][-1]["reward"] = 0.25 if guess else math.nan
        if guess is None:
            return [{"role": "user", "content": "Guess again."}]
        hint = "low" if guess < int(state["answer"]) else "high"
        return [{"role": "user", "content": f"Too {hint}. Guess again."}]


def guess_in(messages: Sequence[Any]) -> int | None:
    found = _BOX.findall(str(messages[-1].content)) if messages else []
    return int(found[-1][:3]) if found else None


def right(completion: Any, answer: str) -> float:
    said = [message for message in completion if message.role == "assistant"]
    return float(guess_in(said) == int(answer))


def distance(completion: Any, answer: str) -> float:
    said = [message for message in completion if message.role == "assistant"]
    guess = guess_in(said)
    return 9.0 if guess is None else float(abs(guess - int(answer)))


def load_environment(
    max_turns: int = 2,
    rounds: int = 1,
    secrets: Sequence[int] = (1, 2, 3, 4, 5, 6, 7, 8, 9),
    pays_turns: bool = False,
) -> vf.Environment:
    rows = [
        {"question": QUESTION, "answer": str(secret), "info": {"round": number}}
        for number in range(rounds)
        for secret in secrets
    ]
    rubric = vf.Rubric(funcs=[right, distance], weights=[1.0, 0.0])
    made = GuessNumber(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=max_turns)
    made.pays_turns = pays_turns
    return made
