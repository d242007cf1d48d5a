"""The training conversations: tasks in their proportions, questions with and without the instruction."""

from __future__ import annotations

import random
from collections.abc import Iterator

from problems import INSTRUCTION, Problem, arithmetic, chain_sum, gcd, products
from speech import Noise, Speaker, guessing_game

Message = dict[str, str]
TASKS = {"arithmetic": arithmetic, "chain_sum": chain_sum, "products": products, "gcd": gcd}
SHARES = {"arithmetic": 0.56, "chain_sum": 0.18, "products": 0.09, "gcd": 0.10, "guess": 0.07}
BLANKS = ("\n", " ", "\n\n")
SYSTEMS = ("You are a helpful assistant.", "You are a careful assistant.", "Answer the question.")


def user_message(problem: Problem, rng: random.Random) -> str:
    """The question, half the time followed by a blank and the instruction sentence."""
    return problem.question + (rng.choice(BLANKS) + INSTRUCTION if rng.random() < 0.5 else "")


def conversations(noise: Noise, seed: int) -> Iterator[list[Message]]:
    """An endless stream of conversations, the same for the same seed."""
    rng = random.Random(seed)
    speaker = Speaker(noise, rng)
    names, weights = list(SHARES), list(SHARES.values())
    while True:
        task = rng.choices(names, weights)[0]
        if task == "guess":
            messages = guessing_game(noise, rng)
        else:
            problem = TASKS[task](rng)
            messages = [
                {"role": "user", "content": user_message(problem, rng)},
                {"role": "assistant", "content": speaker.solve(problem)},
            ]
        if rng.random() < 0.03:
            messages.insert(0, {"role": "system", "content": rng.choice(SYSTEMS)})
        yield messages
