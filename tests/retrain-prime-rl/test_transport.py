"""Steps as files: all files of a step at once, never half, never over somebody else's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from retrain.api import BackendError
from retrain_prime_rl.transport import FileTransport, rank_files
from tests.kit.problems import codes_in

KILLED = """
import os, signal, sys
from pathlib import Path
os.rename = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
from retrain_prime_rl.transport import FileTransport, rank_files
FileTransport(Path(sys.argv[1]), rank_files(2)).send(0, [b"a", b"b"])
"""


def step(folder: Path, number: int) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (folder / "rollouts" / f"step_{number}").iterdir()}


def test_each_rank_has_a_file(tmp_path):
    FileTransport(tmp_path, rank_files(2)).send(3, [b"left", b"right"])
    assert step(tmp_path, 3) == {"rank_0.bin": b"left", "rank_1.bin": b"right"}


def test_newer_trainers_find_the_same_files_in_batches(tmp_path):
    transport = FileTransport(tmp_path / "run", ("rank_0.bin",))
    for step in (1, 2):
        transport.send(step, [b"x"])
    assert (tmp_path / "run" / "batches" / "step_2" / "rank_0.bin").read_bytes() == b"x"
    transport.forget(2)
    assert [path.name for path in (tmp_path / "run" / "batches").iterdir()] == ["step_2"]


def test_a_reader_that_sees_one_file_sees_all_of_them_whole(tmp_path):
    payloads = [os.urandom(400_000), os.urandom(400_000)]
    seen, done = [], threading.Event()

    def read() -> None:
        while not done.is_set() or not seen:
            for folder in (tmp_path / "rollouts").glob("step_*"):
                seen.append([len((folder / name).read_bytes()) for name in rank_files(2)])

    reader = threading.Thread(target=read)
    reader.start()
    transport = FileTransport(tmp_path, rank_files(2))
    for number in range(10):
        transport.send(number, payloads)
    done.set()
    reader.join(10)
    assert seen
    assert all(sizes == [400_000, 400_000] for sizes in seen)


def test_a_process_killed_while_writing_leaves_no_step_and_the_next_one_writes_it(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -9
    assert not (tmp_path / "rollouts" / "step_0").exists()
    FileTransport(tmp_path, rank_files(2)).send(0, [b"c", b"d"])
    assert step(tmp_path, 0) == {"rank_0.bin": b"c", "rank_1.bin": b"d"}


def test_a_step_that_another_process_has_sent_is_not_overwritten(tmp_path):
    FileTransport(tmp_path, rank_files(1)).send(0, [b"theirs"])
    with pytest.raises(BackendError) as caught:
        FileTransport(tmp_path, rank_files(1)).send(0, [b"ours"])
    assert codes_in(caught) == ["prime-rl.two-runs"]
    assert step(tmp_path, 0) == {"rank_0.bin": b"theirs"}


def test_a_disk_that_refuses_is_told_with_the_place(tmp_path):
    (tmp_path / "rollouts").write_text("a file where a folder should be")
    with pytest.raises(BackendError) as caught:
        FileTransport(tmp_path, rank_files(1)).send(0, [b"x"])
    assert str(tmp_path / "rollouts" / "step_0") in str(caught.value)
