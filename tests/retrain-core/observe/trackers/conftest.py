"""A short run that tries a recorder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def toy_run(command: Callable[..., Any], toy_arguments: list[str]) -> Callable[..., Any]:
    """`toy_run("--recorders", "x")`: two steps of the toy policy in this process; its records are in `logs/train`."""
    return lambda *arguments: command(*toy_arguments, "--max-steps", "2", *arguments)
