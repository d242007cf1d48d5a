"""Classic, tool use: the sum has to be computed by the tool."""

from typing import Any

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def right(completion: Any, answer: str) -> float:
    return float(answer in completion[-1].content)


def load_environment() -> vf.Environment:
    rows = [{"question": f"What is {n} + 5?", "answer": str(n + 5)} for n in (1, 2)]
    return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[add], rubric=vf.Rubric(funcs=[right]), max_turns=4)
