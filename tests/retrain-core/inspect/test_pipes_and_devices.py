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

from tests.kit.shared import slow_or_long

LIMIT_S = 30
MANIFEST, CONFIG, METRICS, TEXTS = "run.json", "config.toml", "metrics.jsonl", "emergence/generations.jsonl"
SUMS = "adapter/final/checksums.json"
COMMANDS = {  # and the files that each reads
    ("status", "logs", "--json"): (MANIFEST, METRICS, ".lock"),
    ("report", "logs/a", "--output", "page.html"): (CONFIG, METRICS, TEXTS),
    ("diff", "logs/a", "logs/b"): (MANIFEST, CONFIG, METRICS, TEXTS),
    ("compare", "logs/a", "logs/b"): (MANIFEST, METRICS),
    ("status", "logs/a", "--resume"): (MANIFEST, CONFIG, ".lock", SUMS),
    ("credit", "logs/a"): (CONFIG, METRICS, TEXTS),
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


@pytest.mark.long
@pytest.mark.parametrize("kind", slow_or_long(["FIFO", "link to a device"], "FIFO"))
def test_every_command_says_that_it_is_no_file(kind: str, runs: Path, command: Callable[..., Any]) -> None:
    for words, names in COMMANDS.items():
        told = ""
        for name in names:
            file, kept = runs / name, runs / f"{name}.kept"
            file.rename(kept)
            os.mkfifo(file) if kind == "FIFO" else file.symlink_to("/dev/zero")
            with at_most(LIMIT_S):
                result = command(*words)
            assert result.code in (0, 1, 2), (words, name, result.err)
            assert "Traceback" not in result.err
            told += result.out + result.err
            told += Path("page.html").read_text() if words[0] == "report" and result.code == 0 else ""
            file.unlink()
            kept.rename(file)
        assert "not a regular file" in told, words
    (runs / "failures").mkdir()
    os.mkfifo(runs / "failures/step_0_0.json")
    with at_most(LIMIT_S):
        result = command("audit", "--replay", str(runs / "failures"))
    assert result.code == 2
    assert "not a regular file" in result.err
