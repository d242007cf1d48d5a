"""Classic, plain text without a chat."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def length(completion: Any) -> float:
    """Characters of what was said."""
    return float(len(completion[-1].content))


def load_environment() -> vf.Environment:
    """One beginning."""
    rows = Dataset.from_list([{"prompt": "Once upon a", "answer": ""}])
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[length]))
