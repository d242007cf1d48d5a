"""Weights that come back: whole ones are found, half ones waited for, torn ones named."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from retrain_prime_rl.trainer_folder import answer_offers, newest_broadcast, wait_for

ADAPTER = save({"lora_A": np.ones((4, 8), np.float32), "lora_B": np.zeros((8, 4), np.float32)})


def broadcast(folder: Path, step: int, *, stable: bool = True, weights: bytes = ADAPTER, config: str = "{}") -> Path:
    target = folder / "broadcasts" / f"step_{step}"
    target.mkdir(parents=True, exist_ok=True)
    (target / "adapter_config.json").write_text(config, encoding="utf-8")
    (target / "adapter_model.safetensors").write_bytes(weights)
    if stable:
        (target / "STABLE").touch()
    return target


def test_the_newest_complete_one_counts_by_number_not_by_name(tmp_path):
    for step in (2, 9, 10):
        broadcast(tmp_path, step)
    broadcast(tmp_path, 11, stable=False)
    newest = newest_broadcast(tmp_path).newest
    assert newest is not None
    assert (newest.step, newest.is_adapter) == (10, True)
    assert newest.folder == tmp_path / "broadcasts" / "step_10"


def test_nothing_there_and_things_that_are_no_broadcast(tmp_path):
    assert newest_broadcast(tmp_path).newest is None
    folder = tmp_path / "broadcasts"
    for name in ("step_x", "step_", "step_-1", "checkpoint_5", "step_٣"):
        (folder / name).mkdir(parents=True)
        (folder / name / "STABLE").touch()
    (folder / "step_4").write_text("a file")
    status = newest_broadcast(tmp_path)
    assert status.newest is None


@pytest.mark.parametrize(
    ("weights", "config", "fault"),
    [
        (ADAPTER[:-1], "{}", "bytes and should have"),
        (ADAPTER + b"x", "{}", "bytes and should have"),
        (ADAPTER[:40], "{}", "JSONDecodeError"),
        (b"", "{}", "no safetensors header"),
        (b"\xff" * 64, "{}", "no safetensors header"),
        (ADAPTER, "{", "JSONDecodeError"),
        (ADAPTER, "[]", "is not a JSON object"),
        (ADAPTER, "\x00", "JSONDecodeError"),
    ],
)
def test_a_torn_one_is_named_and_the_one_before_it_found(tmp_path, weights, config, fault):
    broadcast(tmp_path, 1)
    broadcast(tmp_path, 2, weights=weights, config=config)
    status = newest_broadcast(tmp_path)
    assert status.newest is not None
    assert status.newest.step == 1
    (told,) = status.faults
    assert str(tmp_path / "broadcasts" / "step_2") in told
    assert fault in told


def test_missing_weights_are_a_fault(tmp_path):
    (broadcast(tmp_path, 3) / "adapter_model.safetensors").unlink()
    status = newest_broadcast(tmp_path)
    assert status.newest is None
    assert "adapter_model.safetensors" in status.faults[0]


def test_an_offer_is_answered_and_its_weights_count_once_they_are_finished(tmp_path):
    """The handshake of trainers that write nothing before somebody has answered."""

    def train() -> None:
        for step in (0, 1):
            target = tmp_path / "broadcasts" / f"step_{step}"
            target.mkdir(parents=True)
            (target / ".sender_ready").touch()
            while not (target / ".receiver_ready").exists() and not given_up.wait(0.005):
                pass
            (target / ".started").touch()
            seen.append(newest_broadcast(tmp_path).newest)
            broadcast(tmp_path, step, stable=False)
            (target / ".finished").touch()

    seen: list[Any] = []
    given_up = threading.Event()
    trainer = threading.Thread(target=train)
    trainer.start()
    status = wait_for(tmp_path, 1, wait_s=20.0, poll_s=0.01)
    given_up.set()
    trainer.join()
    assert status.newest is not None
    assert (status.newest.step, seen[0], seen[1].step) == (1, None, 0)


def test_what_is_not_offered_is_not_answered(tmp_path):
    target = broadcast(tmp_path, 1)
    answer_offers(tmp_path)
    assert not (target / ".receiver_ready").exists()


def test_all_weights_may_be_spread_over_files_and_each_is_checked(tmp_path):
    target = tmp_path / "broadcasts" / "step_1"
    target.mkdir(parents=True)
    (target / "STABLE").touch()
    assert "no safetensors file" in newest_broadcast(tmp_path).faults[0]
    for number in (1, 2):
        (target / f"model-0000{number}-of-00002.safetensors").write_bytes(ADAPTER)
    newest = newest_broadcast(tmp_path).newest
    assert newest is not None
    assert not newest.is_adapter
    (target / "model-00002-of-00002.safetensors").write_bytes(ADAPTER[:-4])
    assert "model-00002" in newest_broadcast(tmp_path).faults[0]


def test_waiting_ends_with_the_weights_asked_for(tmp_path):
    broadcast(tmp_path, 1)
    threading.Timer(0.3, lambda: broadcast(tmp_path, 2)).start()
    looks = []
    status = wait_for(tmp_path, 2, wait_s=20.0, poll_s=0.01, meanwhile=lambda: looks.append(1))
    assert status.newest is not None
    assert status.newest.step == 2
    assert len(looks) > 1


def test_a_half_written_one_is_waited_for_until_it_is_stable(tmp_path):
    target = broadcast(tmp_path, 1, stable=False, weights=ADAPTER[:50], config="{")

    def finish() -> None:
        broadcast(tmp_path, 1)

    threading.Timer(0.3, finish).start()
    status = wait_for(tmp_path, 1, wait_s=20.0, poll_s=0.01)
    assert status.newest is not None
    assert (target / "adapter_model.safetensors").read_bytes() == ADAPTER


def test_stable_seen_before_the_rest_is_waited_for_too(tmp_path):
    broadcast(tmp_path, 1, weights=ADAPTER[:50])
    threading.Timer(0.3, lambda: broadcast(tmp_path, 1)).start()
    assert wait_for(tmp_path, 1, wait_s=20.0, poll_s=0.01).newest is not None


@pytest.mark.parametrize("wait_s", [0.0, 0.05])
def test_waiting_in_vain_returns_what_there_is(tmp_path, wait_s):
    broadcast(tmp_path, 4)
    broadcast(tmp_path, 5, weights=b"")
    status = wait_for(tmp_path, 5, wait_s=wait_s, poll_s=0.01)
    assert status.newest is not None
    assert status.newest.step == 4
    assert len(status.faults) == 1


def test_a_later_one_will_do(tmp_path):
    broadcast(tmp_path, 7)
    status = wait_for(tmp_path, 5, wait_s=0.0, poll_s=0.01)
    assert status.newest is not None
    assert status.newest.step == 7


def test_the_header_is_read_and_not_the_tensors(tmp_path):
    header = json.dumps({"big": {"dtype": "F32", "shape": [2**28], "data_offsets": [0, 2**30]}}).encode()
    target = broadcast(tmp_path, 1, weights=len(header).to_bytes(8, "little") + header)
    with (target / "adapter_model.safetensors").open("r+b") as stream:
        stream.truncate(8 + len(header) + 2**30)  # a hole: takes no disk
    assert newest_broadcast(tmp_path).newest is not None
