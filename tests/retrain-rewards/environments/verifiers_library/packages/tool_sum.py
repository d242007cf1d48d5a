"""Classic, tool use: the sum has to be computed by the tool."""

from __future__ import annotations

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
    """1 when the last message holds the answer."""
    return float(answer in completion[-1].content)


def load_environment() -> vf.Environment:
    """Two sums."""
    rows = [{"question": f"What is {n} + 5?", "answer": str(n + 5)} for n in (1, 2)]
    return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[add], rubric=vf.Rubric(funcs=[right]), max_turns=4)
