"""One process at a time holds a run folder, and a process that only looks does not block it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from retrain.kernel.errors import ConfigError
from retrain.records.files import RunLock, owner_of

HOLD = "import sys; from pathlib import Path; from retrain.records.files import RunLock\n"
HOLD += "kept = RunLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"


@pytest.fixture
def holder(tmp_path: Path) -> subprocess.Popen[str]:
    """Another process that holds the folder."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_free_folder_has_no_owner(tmp_path: Path) -> None:
    assert owner_of(tmp_path) == 0
    assert owner_of(tmp_path / "nowhere") == 0
    lock = RunLock(tmp_path)
    assert owner_of(tmp_path) == os.getpid()
    lock.release()
    lock.release()
    assert owner_of(tmp_path) == 0


def test_a_second_process_is_refused_with_the_first_ones_number(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"process {holder.pid}"):
        RunLock(tmp_path)
    assert owner_of(tmp_path) == holder.pid  # the refused one has not overwritten it
    holder.communicate()
    RunLock(tmp_path).release()


def test_a_lock_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ConfigError, match=r"\.lock: cannot be opened"):
        RunLock(tmp_path)


def test_a_process_of_another_machine_has_no_number_here(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text(f"{os.getpid()} another-machine\n")  # as a shared folder shows it
    assert owner_of(tmp_path) == -1


def test_the_lock_goes_with_a_killed_process(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.kill()
    holder.communicate()
    assert owner_of(tmp_path) == 0
    RunLock(tmp_path).release()


def test_a_process_that_polls_the_lock_does_not_keep_a_run_out(tmp_path: Path) -> None:
    RunLock(tmp_path).release()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            owner_of(tmp_path)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for _ in range(100):
            RunLock(tmp_path).release()
    finally:
        is_over.set()
        watcher.join()
