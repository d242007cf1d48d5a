"""Which step of the trainer comes next, from whatever an earlier life has left."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrain.api import ConfigError
from retrain_prime_rl.steps import LEDGER, find_next_step, record
from retrain_prime_rl.transport import rank_files

NAMES = rank_files(2)


def rollout(folder: Path, step: int, names: tuple[str, ...] = NAMES) -> None:
    target = folder / "rollouts" / f"step_{step}"
    target.mkdir(parents=True)
    for name in names:
        (target / name).write_bytes(b"x")


def broadcast(folder: Path, step: int, *, stable: bool = True) -> None:
    target = folder / "broadcasts" / f"step_{step}"
    target.mkdir(parents=True)
    if stable:
        (target / "STABLE").touch()


def test_a_new_folder_begins_at_zero(tmp_path):
    assert find_next_step(tmp_path, NAMES) == 0
    assert find_next_step(tmp_path, NAMES, resumes=True) == 0


def test_a_resumed_run_goes_on_after_the_last_batch(tmp_path):
    for step in (0, 1, 10, 9):
        rollout(tmp_path, step)
    broadcast(tmp_path, 9)
    (tmp_path / "rollouts" / ".step_11.tmp").mkdir()  # of a killed writer
    assert find_next_step(tmp_path, NAMES, resumes=True) == 11


def test_over_a_socket_ledger_and_weights_tell(tmp_path):
    record(tmp_path, 4)
    assert find_next_step(tmp_path, NAMES, resumes=True) == 4
    broadcast(tmp_path, 6)
    broadcast(tmp_path, 8, stable=False)
    assert find_next_step(tmp_path, NAMES, resumes=True) == 6


@pytest.mark.parametrize("leave", [lambda d: rollout(d, 0), lambda d: broadcast(d, 1), lambda d: record(d, 3)])
def test_a_new_run_does_not_go_on_in_the_folder_of_another(tmp_path, leave):
    leave(tmp_path)
    with pytest.raises(ConfigError) as caught:
        find_next_step(tmp_path, NAMES)
    assert str(tmp_path) in str(caught.value)
    assert "first_step = " in str(caught.value)


def test_first_step_takes_over_where_nothing_later_lies(tmp_path):
    rollout(tmp_path, 4)
    broadcast(tmp_path, 5)
    assert find_next_step(tmp_path, NAMES, first_step=5) == 5


@pytest.mark.parametrize("later", [lambda d: rollout(d, 5), lambda d: broadcast(d, 6), lambda d: broadcast(d, 9)])
def test_first_step_refuses_what_a_former_life_of_the_trainer_left_behind(tmp_path, later):
    later(tmp_path)
    with pytest.raises(ConfigError, match="remove them"):
        find_next_step(tmp_path, NAMES, first_step=5, resumes=True)


def test_a_step_without_all_its_files_is_a_hole_and_named(tmp_path):
    rollout(tmp_path, 0)
    rollout(tmp_path, 1, ("rank_0.bin",))
    with pytest.raises(ConfigError) as caught:
        find_next_step(tmp_path, NAMES, resumes=True)
    assert "step_1" in str(caught.value)
    assert "rank_1.bin" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"next_step": "many"}', "{}"])
def test_a_damaged_ledger_is_named_with_the_way_out(tmp_path, text):
    (tmp_path / LEDGER).write_text(text)
    with pytest.raises(ConfigError, match="set first_step"):
        find_next_step(tmp_path, NAMES, resumes=True)


def test_the_ledger_is_replaced_whole(tmp_path):
    for step in range(3):
        record(tmp_path, step)
    assert [path.name for path in tmp_path.iterdir()] == [LEDGER]
