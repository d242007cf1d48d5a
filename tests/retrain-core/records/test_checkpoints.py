"""Checkpoints are complete or invisible, are trusted only by checksum, and are pruned in order."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.errors import BackendError, CheckpointError
from retrain.records import checkpoints
from retrain.records.checkpoints import (
    checkpoint_folders,
    clear_unfinished,
    newest_valid,
    prune,
    read_checkpoint,
    save_checkpoint,
    set_newer_aside,
)
from tests.kit.problems import codes_in, refused


def state(next_step, *, unfinished=False, **metrics):
    progress = {"unfinished": {"step": next_step} if unfinished else None}
    return {"next_step": next_step, "progress": progress, "metrics": metrics}


def fill(folder):
    (folder / "adapter.bin").write_bytes(bytes(range(256)) * 40)
    (folder / "deep").mkdir()
    (folder / "deep" / "moments.bin").write_bytes(b"moments")


@pytest.fixture
def save(tmp_path):
    """`save(3, score=0.5)`: the checkpoint after three steps; `name=` gives it another name."""

    def write(next_step, *, name="", unfinished=False, **metrics):
        name = name or f"checkpoint_step_{next_step + unfinished}"
        return save_checkpoint(tmp_path, name, fill, state(next_step, unfinished=unfinished, **metrics))

    return write


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_comes_back_and_a_stop_within_a_step_is_newer(save, tmp_path):
    found = read_checkpoint(save(3, score=0.5))
    assert (found.next_step, found.first_unwritten_step, found.state["metrics"]) == (3, 3, {"score": 0.5})
    assert (found.path / "deep" / "moments.bin").read_bytes() == b"moments"
    text = (save(3, score=0.5) / "checkpoint.json").read_text(encoding="utf-8")
    assert json.loads(text) == state(3, score=0.5)
    assert "\n" in text.strip()  # for people, too
    save(2)
    assert read_checkpoint(save(2, unfinished=True)).first_unwritten_step == 3
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["checkpoint_step_3", "checkpoint_step_2"]


@settings(max_examples=40)
@given(which=st.integers(0, 3), at=st.floats(0, 1), change=st.sampled_from(["flip", "cut", "grow", "remove"]))
def test_any_change_to_a_file_is_detected(which, at, change, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    path = save_checkpoint(folder, "checkpoint_step_3", fill, state(3))
    file = sorted(file for file in path.rglob("*") if file.is_file())[which]
    content = bytearray(file.read_bytes())
    place = min(int(at * len(content)), len(content) - 1)
    if change == "flip":
        content[place] ^= 1
    elif change == "cut":
        del content[place:]
    elif change == "grow":
        content.append(0)
    file.unlink() if change == "remove" else file.write_bytes(content)
    with pytest.raises(CheckpointError):
        read_checkpoint(path)
    shutil.rmtree(folder)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "3", "{", '{"checkpoint.json": 1}', "\x00"])
def test_hostile_checksums_are_damage_and_none_vouch_without_the_state(text, save):
    path = save(1)
    (path / "checksums.json").write_text(text)
    assert refused(read_checkpoint, path) == ["checkpoint.damaged"]


def test_the_newest_valid_one_is_found_and_faults_of_newer_ones_are_reported(save, tmp_path):
    for step in (2, 10, 9):
        save(step)
    save(11, name="final")
    for name in ("final", "checkpoint_step_10"):
        (tmp_path / name / "checkpoint.json").unlink()  # `final` is the newest without its state, too
    found, problems = newest_valid(tmp_path)
    assert found.path.name == "checkpoint_step_9"
    assert [Path(problem.where).parent.name for problem in problems] == ["final", "checkpoint_step_10"]
    assert newest_valid(tmp_path / "nowhere") == (None, [])


def test_other_folders_are_no_checkpoints(save, tmp_path):
    save(1)
    (tmp_path / "notes").mkdir()
    (tmp_path / ".checkpoint_step_9.tmp").mkdir()
    shutil.copytree(tmp_path / "checkpoint_step_1", tmp_path / ".checkpoint_step_8.tmp")
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["checkpoint_step_1"]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("I/O error"), BackendError("x")]
)
def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(error, save, tmp_path):
    save(1)

    def broken(folder):
        fill(folder)
        raise error

    for name in ("checkpoint_step_2", "checkpoint_step_1"):
        with pytest.raises((CheckpointError, BackendError)) as caught:
            save_checkpoint(tmp_path, name, broken, state(2))
        assert isinstance(error, BackendError) or codes_in(caught) == ["checkpoint.unwritable"]
    assert names(tmp_path) == ["checkpoint_step_1"]
    assert read_checkpoint(tmp_path / "checkpoint_step_1").next_step == 1


def test_a_checkpoint_that_has_no_place_is_refused_before_anything_is_written(save, tmp_path, monkeypatch):
    save(1)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path / "file" / "adapter", "final", fill, state(1))
    assert codes_in(caught) == ["checkpoint.unwritable"]
    size = sum(file.stat().st_size for file in (tmp_path / "checkpoint_step_1").rglob("*") if file.is_file())
    for free, is_enough in ((checkpoints.SPARE_BYTES + size - 1, False), (checkpoints.SPARE_BYTES + size, True)):
        usage = shutil.disk_usage(tmp_path)._replace(free=free)
        monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _, usage=usage: usage)
        if is_enough:
            save(2)
        else:
            assert refused(save, 2) == ["checkpoint.no-space"]
            assert names(tmp_path) == ["checkpoint_step_1", "file"]


def test_a_replacement_killed_between_its_renames_loses_nothing(save, tmp_path):
    save(1)
    save(4, name="final").rename(tmp_path / ".final.old")
    found, _ = newest_valid(tmp_path)
    assert found.next_step == 4
    clear_unfinished(tmp_path)
    assert names(tmp_path) == ["checkpoint_step_1", "final"]
    assert read_checkpoint(tmp_path / "final").next_step == 4


def test_what_an_interrupted_write_or_removal_left_goes(save, tmp_path):
    save(1)
    for name in (".checkpoint_step_2.tmp", ".checkpoint_step_1.old", ".checkpoint_step_0.pruned"):
        shutil.copytree(tmp_path / "checkpoint_step_1", tmp_path / name)
    (tmp_path / ".mine").mkdir()
    clear_unfinished(tmp_path)
    clear_unfinished(tmp_path / "nowhere")
    assert names(tmp_path) == [".mine", "checkpoint_step_1"]


def test_damaged_ones_that_are_newer_stand_aside_so_that_pruning_does_not_count_them(save, tmp_path):
    for step in (2, 4, 6):
        save(step)
    for step in (4, 6):
        (tmp_path / f"checkpoint_step_{step}" / "adapter.bin").write_bytes(b"")
    found, _ = newest_valid(tmp_path)
    set_newer_aside(tmp_path, found)
    save(3)
    prune(tmp_path, keep_last=1, keep_best=0, metric="score")
    kept, problems = newest_valid(tmp_path)
    assert (kept.next_step, problems) == (3, [])
    assert names(tmp_path) == [".checkpoint_step_4.damaged", ".checkpoint_step_6.damaged", "checkpoint_step_3"]


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "kept"),
    [(0, 0, {1, 2, 3, 4, 5}), (1, 0, {5}), (2, 0, {4, 5}), (0, 1, {2, 5}), (1, 2, {2, 3, 5}), (9, 9, {1, 2, 3, 4, 5})],
)
def test_pruning_keeps_the_last_and_the_best(keep_last, keep_best, kept, save, tmp_path):
    for step, score in enumerate((0.1, 0.9, 0.5, 0.3), start=1):
        save(step, score=score)
    save(5)  # without the metric
    save(5, name="final")
    removed = prune(tmp_path, keep_last=keep_last, keep_best=keep_best, metric="score")
    assert names(tmp_path) == [*(f"checkpoint_step_{step}" for step in sorted(kept)), "final"]
    assert {path.name for path in removed} == {f"checkpoint_step_{step}" for step in {1, 2, 3, 4, 5} - kept}
