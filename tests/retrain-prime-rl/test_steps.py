"""How many steps the trainer was sent, from whatever an earlier life has left; it counts them from 1."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from retrain.api import ConfigError
from retrain_prime_rl import trainer_folder
from retrain_prime_rl.trainer_folder import LEDGER, last_needless, record
from retrain_prime_rl.transport import rank_files

NAMES = rank_files(2)


def find_sent(folder: Path, *, first_step: int = -1, resumes: bool = False) -> int:
    return trainer_folder.find_sent(folder, NAMES, first=1, first_step=first_step, resumes=resumes)


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


def checkpoint(folder: Path, step: int, *, complete: bool = True) -> None:
    target = folder / "checkpoints" / f"step_{step}" / "trainer"
    target.mkdir(parents=True)
    if complete:
        (target / ".metadata").touch()


def test_a_new_folder_begins_at_none_with_or_without_a_trainer_that_waits(tmp_path):
    assert find_sent(tmp_path) == find_sent(tmp_path, resumes=True) == 0
    broadcast(tmp_path, 0)  # written when a trainer starts
    assert find_sent(tmp_path) == find_sent(tmp_path, resumes=True) == 0


def test_a_resumed_run_goes_on_after_the_last_batch(tmp_path):
    for step in (1, 2, 10, 9):
        rollout(tmp_path, step)
    broadcast(tmp_path, 8)
    (tmp_path / "rollouts" / ".step_11.tmp").mkdir()  # of a killed writer
    assert find_sent(tmp_path, resumes=True) == 10


def test_the_older_wire_counts_from_zero(tmp_path):
    for step in (0, 1):
        rollout(tmp_path, step)
    assert trainer_folder.find_sent(tmp_path, NAMES, first=0, resumes=True) == 2


def test_over_a_socket_ledger_and_weights_tell(tmp_path):
    record(tmp_path, 4)
    assert find_sent(tmp_path, resumes=True) == 4
    broadcast(tmp_path, 6)
    broadcast(tmp_path, 8, stable=False)
    assert find_sent(tmp_path, resumes=True) == 6


@pytest.mark.parametrize("leave", [lambda d: rollout(d, 1), lambda d: broadcast(d, 1), lambda d: record(d, 1)])
def test_a_new_run_does_not_go_on_in_the_folder_of_another(tmp_path, leave):
    leave(tmp_path)
    with pytest.raises(ConfigError) as caught:
        find_sent(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "first_step = 2" in str(caught.value)


def test_first_step_takes_over_where_nothing_later_lies(tmp_path):
    rollout(tmp_path, 5)
    broadcast(tmp_path, 5)
    assert find_sent(tmp_path, first_step=6) == 5


@pytest.mark.parametrize("later", [lambda d: rollout(d, 5), lambda d: broadcast(d, 5), lambda d: broadcast(d, 9)])
def test_first_step_refuses_what_a_former_life_of_the_trainer_left_behind(tmp_path, later):
    later(tmp_path)
    with pytest.raises(ConfigError, match="checkpoint of step 4 and remove the files of later steps"):
        find_sent(tmp_path, first_step=5, resumes=True)


def test_a_step_without_all_its_files_is_a_hole_and_named(tmp_path):
    rollout(tmp_path, 1)
    rollout(tmp_path, 2, ("rank_0.bin",))
    with pytest.raises(ConfigError) as caught:
        find_sent(tmp_path, resumes=True)
    assert "step_2" in str(caught.value)
    assert "rank_1.bin" in str(caught.value)


def test_a_step_that_is_missing_before_the_last_one_is_a_hole_unless_the_trainer_has_read_it(tmp_path):
    for step in (3, 5):
        rollout(tmp_path, step)
    broadcast(tmp_path, 3)
    with pytest.raises(ConfigError, match="step_4"):
        find_sent(tmp_path, resumes=True)
    broadcast(tmp_path, 4)
    assert find_sent(tmp_path, resumes=True) == 5


def test_a_trainer_that_was_put_back_behind_what_lies_there_is_told(tmp_path):
    for step in (4, 5):
        rollout(tmp_path, step)
        broadcast(tmp_path, step)
    broadcast(tmp_path, 2)  # its checkpoint of step 2, written after the others
    for step in (4, 5):
        os.utime(tmp_path / "broadcasts" / f"step_{step}" / "STABLE", ns=(step, step))
    with pytest.raises(ConfigError) as caught:
        find_sent(tmp_path, resumes=True)
    assert "put back to step 2" in str(caught.value)
    assert "first_step = 3" in str(caught.value)


@pytest.mark.parametrize(("checkpoints", "needless"), [([], 8), ([4], 4), ([4, 6], 6), ([9], 8), ([2, 3], 3)], ids=str)
def test_batches_are_kept_from_the_newest_checkpoint_on(tmp_path, checkpoints, needless):
    for step in checkpoints:
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 7, complete=False)  # being written
    assert last_needless(tmp_path, 9) == needless
    assert last_needless(tmp_path, 0) == 0


def test_a_trainer_of_0_8_0_is_refused_by_name(tmp_path):
    trainer_folder.refuse_other_trainer(tmp_path, "per_token")
    file = tmp_path / "run_default" / "control" / "orch.toml"
    file.parent.mkdir(parents=True)
    file.touch()
    with pytest.raises(ConfigError, match=r"PRIME-RL 0\.8\.0 or earlier"):
        trainer_folder.refuse_other_trainer(tmp_path, "per_token")


def test_a_folder_that_no_older_trainer_would_look_into_is_refused(tmp_path):
    file = tmp_path / "run_one" / "control" / "orch.toml"
    file.parent.mkdir(parents=True)
    with pytest.raises(ConfigError, match="does not look for batches"):
        trainer_folder.refuse_other_trainer(tmp_path / "run_one", "scalar")
    file.touch()
    trainer_folder.refuse_other_trainer(tmp_path / "run_one", "scalar")
    with pytest.raises(ConfigError, match="does not look for batches"):
        trainer_folder.refuse_other_trainer(tmp_path, "scalar")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"steps_sent": "many"}', "{}"])
def test_a_damaged_ledger_is_named_with_the_way_out(tmp_path, text):
    (tmp_path / LEDGER).write_text(text)
    with pytest.raises(ConfigError, match="set first_step"):
        find_sent(tmp_path, resumes=True)


def test_the_ledger_is_replaced_whole(tmp_path):
    for step in range(3):
        record(tmp_path, step)
    assert [path.name for path in tmp_path.iterdir()] == [LEDGER]
