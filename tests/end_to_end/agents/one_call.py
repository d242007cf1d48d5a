"""An agent of the standard library alone, which asks once."""

from __future__ import annotations

from typing import Any

from side_by_side import ask


def play(task: dict[str, Any]) -> str:
    return ask(task["messages"])
