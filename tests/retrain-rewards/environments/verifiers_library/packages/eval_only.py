"""Classic, with a data set for evaluation alone."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset


def right(completion: object, answer: str) -> float:
    """Never asked."""
    return 1.0


def load_environment() -> vf.Environment:
    """One question to evaluate on."""
    rows = Dataset.from_list([{"question": "1 + 1 = ?", "answer": "2"}])
    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric(funcs=[right]))
