"""The throttle, with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from retrain.api import BackendError, Throttle

HOLDER = """
import sys, time
from retrain.api import Throttle
with Throttle(sys.argv[1], int(sys.argv[2])).slot():
    print("in", flush=True)
    sys.stdin.readline()
print("out", flush=True)
"""
COUNTER = """
import os, sys, time
from pathlib import Path
from retrain.api import Throttle
throttle, marks, most = Throttle(sys.argv[1], 2), Path(sys.argv[2]), 0
for turn in range(10):
    with throttle.slot():
        mark = marks / f"{os.getpid()}"
        mark.touch()
        most = max(most, len(list(marks.iterdir())))
        time.sleep(0.002)
        mark.unlink()
print(most)
"""


def hold(folder: Path, count: int = 1) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def waiting(folder: Path) -> int:
    return len(list(folder.glob("ticket_*.lock")))


def wait_until(folder: Path, tickets: int) -> None:
    while waiting(folder) != tickets:
        time.sleep(0.005)


def test_without_a_folder_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Throttle("", 1).slot(), Throttle("", 1).slot():
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendError, match="throttle folder"), Throttle(tmp_path / "file" / "t", 1).slot():
        pass


@pytest.mark.long
def test_never_more_than_allowed(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    program = [sys.executable, "-c", COUNTER, str(tmp_path / "t"), str(marks)]
    processes = [subprocess.Popen(program, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    most = [int(process.communicate()[0]) for process in processes]
    assert max(most) <= 2
    assert waiting(tmp_path / "t") == 0


def test_whoever_asked_first_is_served_first(tmp_path: Path) -> None:
    throttle, served = Throttle(tmp_path, 1), []
    threads = []

    def work(number: int) -> None:
        with throttle.slot():
            served.append(number)

    with throttle.slot():
        for number in range(5):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            wait_until(tmp_path, number + 1)
    for thread in threads:
        thread.join()
    assert served == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("is_queued", [False, pytest.param(True, marks=pytest.mark.long)], ids=["slot", "place"])
def test_a_slot_and_a_place_in_the_queue_go_with_a_killed_process(tmp_path: Path, is_queued: bool) -> None:
    with Throttle(tmp_path, 1).slot() if is_queued else nullcontext():
        first = hold(tmp_path)
        wait_until(tmp_path, 1) if is_queued else says(first)
        second = hold(tmp_path)
        wait_until(tmp_path, 1 + is_queued)
        first.kill()
        first.communicate()
    assert says(second) == "in"
    second.communicate("\n")
    assert waiting(tmp_path) == 0
    for _ in range(2):
        with pytest.raises(KeyError), Throttle(tmp_path, 1).slot():
            raise KeyError("an exception lets go of the slot")
