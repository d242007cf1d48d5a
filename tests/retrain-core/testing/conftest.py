"""The parts beside these tests, sound and broken ones, and which checks of their suite they fail."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from retrain.testing import ConformanceError, conformance

PARTS = Path(__file__).parent / "parts"
TOY_MODEL = "conformance:toy"  # the tokenizer that the suites make in memory
COMMON = {"is_found_by_name", "says_what_it_is", "is_announced_without_heavy_imports", "refuses_unknown_options"}
Failures = Callable[..., dict[str, str]]


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The parts can be named by dotted paths, here and in the processes that they are sent to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(PARTS))
    yield
    for name in [path.stem for path in PARTS.glob("*.py")]:
        sys.modules.pop(name, None)


@pytest.fixture
def failures() -> Failures:
    """`failures("transform", "some.part", only=..., config=...)`: message by name of the check that failed."""

    def run(
        kind: str, name: str, *, only: str = "", config: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, str]:
        found = {}
        for check in conformance(kind, name, config={"model": {"model": TOY_MODEL}, **(config or {})}):
            if str(check) in COMMON or (only and str(check) != only):
                continue
            try:
                check()
            except ConformanceError as error:
                found[str(check)] = str(error)
        return found

    return run
