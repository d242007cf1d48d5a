"""Made-up campaigns, the command on them, and a browser to look at the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from retrain.report.watch_server import WatchServer
from tests.kit import made_runs
from tests.kit.devtools import browser

CONDITIONS = {"grpo+none": 0.0, "maxrl+none": 0.02, "maxrl+gtpo_sepa": 0.2}


@pytest.fixture(scope="session")
def tab() -> Iterator[Any]:
    """One page of one browser for all tests; each opens its own file in it."""
    with browser() as page:
        yield page


@pytest.fixture
def campaign(made: Any, tmp_path: Path) -> Callable[..., Path]:
    """`campaign(effects, seeds=..., ...)`: a made-up campaign on disk, three conditions by default."""

    def write(effects: dict[str, float] | None = None, **options: Any) -> Path:
        settings = {"seeds": range(8), "steps": 60, "completions": 8} | options
        folder: Path = made.write_campaign(tmp_path / "campaign", effects or CONDITIONS, **settings)
        return folder

    return write


@pytest.fixture
def report(command: Callable[..., Any]) -> Callable[..., Any]:
    """`report("campaign", "--json")`: the result of `retrain report`."""
    return lambda *arguments: command("report", *map(str, arguments))


@pytest.fixture
def page_of(printed_json: Callable[..., Any]) -> Callable[..., tuple[str, dict[str, Any]]]:
    """The page that the command wrote, and what it said as JSON."""

    def call(*arguments: object) -> tuple[str, dict[str, Any]]:
        said = printed_json("report", *arguments)
        return Path(said["file"]).read_text(encoding="utf-8"), said

    return call


@pytest.fixture
def watched_run(tmp_path: Path) -> Callable[..., Path]:
    """`watched_run(steps=3)`: the folder of a run in progress."""

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
