"""`retrain status --follow`: the installed script in a pipe and on a pseudo-terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.inspect import status_command
from retrain.records.runs.campaign_status import scan

Make = Callable[..., Path]
SCRIPT = str(Path(sys.executable).with_name("retrain"))


def test_watching_as_json_is_a_line_each_time(make_run: Make, tmp_path: Path) -> None:
    make_run("logs/a")
    arguments = [SCRIPT, "status", "--json", "--follow", "--interval", "0.05"]
    watcher = subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert watcher.stdout
    snapshots = [json.loads(watcher.stdout.readline()) for _ in range(2)]
    watcher.send_signal(signal.SIGINT)
    _, err = watcher.communicate(timeout=60)
    assert [len(snapshot["runs"]) for snapshot in snapshots] == [1, 1]
    assert (watcher.returncode, err) == (0, "")


@pytest.mark.parametrize("words", [["status", "--follow"], ["top"]])
def test_watching_on_a_terminal_refreshes_until_ctrl_c(
    make_run: Make, tmp_path: Path, sleeper: subprocess.Popen[bytes], words: list[str]
) -> None:
    make_run("logs/first", status="running", pid=sleeper.pid, steps=2)
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
    watcher = subprocess.Popen(
        [SCRIPT, *words, "--interval", "0.1"], cwd=tmp_path, env=environ, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    try:
        seen = read_until(ours, "first")
        assert "running" in seen + read_until(ours, "2/10", seen)
        make_run("logs/second", status="running", pid=sleeper.pid)
        read_until(ours, "second")
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait(timeout=60) == 0
        assert "Traceback" not in read_until(ours, "\x1b[?1049l")  # the screen is given back
    finally:
        watcher.kill()
        watcher.wait()
        os.close(ours)


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_cannot_move_its_cursor_gets_one_table_after_the_other(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, term: str
) -> None:
    make_run("logs/a")
    looks = iter([scan(tmp_path), scan(tmp_path)])  # then StopIteration, in place of Ctrl-C
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", term)
    with pytest.raises(StopIteration):
        status_command._follow(looks.__next__, 0.0, as_json=False)
    assert terminal.getvalue().count("Runs: 1") == 2
    assert "\x1b" not in terminal.getvalue()


def read_until(terminal: int, wanted: str, seen: str = "") -> str:
    """What the terminal shows up to and with `wanted`."""
    deadline = time.monotonic() + 60
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"{wanted!r} never came; seen: {seen!r}"
        try:
            seen += os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # the other end has closed
            break
    assert wanted in seen, seen
    return seen
