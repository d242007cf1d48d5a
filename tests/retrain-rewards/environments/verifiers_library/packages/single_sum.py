"""Classic, one turn: add two numbers; a system prompt and two weighted reward functions."""

from typing import Any

import verifiers as vf
from datasets import Dataset


def right(completion: Any, answer: str) -> float:
    return float(completion[-1].content.strip().endswith(answer))


def short(completion: Any) -> float:
    return float(len(completion[-1].content) <= 20)


def load_environment(split: str = "train", size: int = 4) -> vf.Environment:
    rows = [
        {"question": f"{n} + {n + 1} = ?", "answer": str(2 * n + 1), "task": "sum", "info": {"n": n, "split": split}}
        for n in [*range(size), 0]
    ]
    rubric = vf.Rubric(funcs=[right, short], weights=[1.0, 0.5])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), system_prompt="Add.", rubric=rubric)
