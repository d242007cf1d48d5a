"""A made-up run, and the server that watches it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from retrain.report.watch_server import WatchServer
from tests.kit import devtools, made_runs


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """`make_run(steps=3)`: the folder of a run."""

    def make(**options: Any) -> Path:
        chosen = {"steps": 6, "eval_every": 2, "completions": 30, "status": "running"} | options
        folder: Path = made_runs.write_run(tmp_path / "run", made_runs.MadeRun(**chosen))
        return folder

    return make


@pytest.fixture
def watch() -> Iterator[Callable[[Path], WatchServer]]:
    """`watch(folder)`: a server at work, closed afterwards."""
    with ExitStack() as stack:
        yield lambda folder: stack.enter_context(WatchServer(folder, every_s=0.05))


@pytest.fixture
def browser() -> Any:
    """`with browser() as tab`."""
    return devtools.browser
