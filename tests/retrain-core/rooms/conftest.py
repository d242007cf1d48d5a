"""Made-up campaigns, and the command on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import retrain.rooms.insight.plugin as room
from tests import made_runs

ROW = ("compare", "Compare conditions over their seeds, with tests and intervals.", "compare.command:command")


@pytest.fixture(scope="session")
def made() -> ModuleType:
    """`made.write_campaign(...)`, `made.write_run(...)`, `made.MadeRun(...)`."""
    return made_runs


@pytest.fixture
def compare(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`compare("campaign", "--metric", "...")`: the result of `retrain compare`."""
    if not any(row[0] == "compare" for row in room.COMMANDS):
        monkeypatch.setattr(room, "COMMANDS", (*room.COMMANDS, ROW))

    def call(*arguments: object) -> Any:
        return command("compare", *map(str, arguments))

    return call


@pytest.fixture
def compare_json(compare: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """The JSON of `retrain compare`, which must be all that is printed."""

    def call(*arguments: object) -> dict[str, Any]:
        result = compare(*arguments, "--json")
        assert (result.code, result.err) == (0, "")
        content: dict[str, Any] = json.loads(result.out, parse_constant=pytest.fail)
        return content

    return call
