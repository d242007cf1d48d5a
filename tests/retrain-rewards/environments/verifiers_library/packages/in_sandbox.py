"""Classic, of a kind that needs a sandbox."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


class SandboxEnv(vf.SingleTurnEnv):  # type: ignore[misc]
    """Has the name of the library's own class, without the sandbox that it would start."""


def load_environment(**_: Any) -> vf.Environment:
    """One task."""
    rows = Dataset.from_list([{"question": "run it", "answer": ""}])
    return SandboxEnv(dataset=rows, rubric=vf.Rubric(funcs=[]))
