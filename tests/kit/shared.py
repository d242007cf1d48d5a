"""What many tests share: a folder that is dear to make, and which of many cases run at every change."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that `make` has filled; the workers of pytest-xdist share it. Tests leave it as it is, or add to it."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # each worker has its own below
    folder, finished = base / f"shared-{name}", base / f"shared-{name}.finished"
    with (base / f"shared-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
        if not finished.exists():
            shutil.rmtree(folder, ignore_errors=True)  # left by a worker that failed halfway
            folder.mkdir()
            make(folder)
            finished.touch()
    return folder


def slow_or_long(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Parameters of a test that proves the same of many cases.

    `quick` ones are tried at every change, of the others the first is `slow`, the rest `long`.
    """
    given = list(cases)
    assert set(quick) <= set(given), f"no such case: {set(quick) - set(given)}"
    others = [case for case in given if case not in quick]
    marks = {case: pytest.mark.long if place else pytest.mark.slow for place, case in enumerate(others)}
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks.get(case, ())) for case in given]


def first_or_long(cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test whose cases are dear and prove the same: the first at every change, the others `long`."""
    first, *others = cases
    return [first, *(_at_night(case) for case in others)]


def _at_night(case: Any) -> Any:
    if hasattr(case, "marks"):
        return pytest.param(*case.values, id=case.id, marks=(*case.marks, pytest.mark.long))
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
