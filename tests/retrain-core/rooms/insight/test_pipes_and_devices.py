"""No command waits for a pipe or reads a device that stands where a file of a run should be."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 30
FILES = (
    "run.json",
    "config.toml",
    "metrics.jsonl",
    "emergence/generations.jsonl",
    ".lock",
    "adapter/final/checksums.json",
)
COMMANDS = {
    "status": ("status", "logs", "--json"),
    "report": ("report", "logs/a", "--output", "page.html"),
    "diff": ("diff", "logs/a", "logs/b"),
    "compare": ("compare", "logs/a", "logs/b"),
    "resume-check": ("resume-check", "logs/a"),
    "credit": ("credit", "logs/a"),
}


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def fail(*_: object) -> None:
        raise AssertionError("it waits")

    former = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


@pytest.fixture
def runs(toy_run: Callable[..., Path], tmp_path: Path) -> Path:
    """Two runs below `logs`."""
    toy_run("logs/a", "--max-steps", "2")
    shutil.copytree(tmp_path / "logs/a", tmp_path / "logs/b")
    return tmp_path / "logs/a"


@pytest.mark.parametrize("kind", ["FIFO", "link to a device"])
def test_every_command_says_that_it_is_no_file(kind: str, runs: Path, command: Callable[..., Any]) -> None:
    complaints = dict.fromkeys(COMMANDS, 0)
    for name in FILES:
        file, kept = runs / name, runs / f"{name}.kept"
        file.rename(kept)
        os.mkfifo(file) if kind == "FIFO" else file.symlink_to("/dev/zero")
        for title, words in COMMANDS.items():
            with at_most(LIMIT_S):
                result = command(*words)
            assert result.code in (0, 1, 2), (title, name, result.err)
            assert "Traceback" not in result.err
            page = Path("page.html").read_text() if title == "report" and result.code == 0 else ""
            complaints[title] += "not a regular file" in result.out + result.err + page
        file.unlink()
        kept.rename(file)
    assert all(complaints.values()), complaints


def test_a_failed_score_is_not_read_from_a_pipe(runs: Path, command: Callable[..., Any], tmp_path: Path) -> None:
    (runs / "failures").mkdir()
    os.mkfifo(runs / "failures/step_0_0.json")
    with at_most(LIMIT_S):
        result = command("score", "--replay", str(runs / "failures"))
    assert result.code == 2
    assert "not a regular file" in result.err
