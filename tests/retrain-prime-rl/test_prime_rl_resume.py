"""A run that goes on: with the trainer where it is, with a step under way, with one that nobody has noted."""

from __future__ import annotations

import json
import logging
import threading

import pytest
from safetensors.numpy import load_file

from retrain.api import BackendError, ResumeError
from retrain_prime_rl import trainer_folder
from retrain_prime_rl.backend import STATE
from retrain_prime_rl.transport import rank_files


def test_save_and_load_go_on_with_the_trainer_where_it_is(sent, broadcast, backend, batch, tmp_path, caplog):
    made, _ = backend()
    for step in (1, 2):
        broadcast(tmp_path, step)
        made.train(batch)
        made.publish()
    saved = tmp_path / "saved"
    saved.mkdir()
    made.save(saved)
    theirs = load_file(tmp_path / "broadcasts" / "step_2" / "adapter_model.safetensors")
    adapter = load_file(saved / "adapter_model.safetensors")
    assert adapter.keys() == {f"base_model.model.{name}" for name in theirs}
    assert all((adapter[f"base_model.model.{name}"] == tensor).all() for name, tensor in theirs.items())
    broadcast(tmp_path, 3)
    made.train(batch)  # after the checkpoint, and then the process dies
    again, engine = backend(trainer_folder.find_sent(tmp_path, rank_files(2), first=1, resumes=True))
    with caplog.at_level(logging.WARNING, "retrain"):
        again.load(saved)
    assert "1 steps ahead of this checkpoint" in caplog.text
    assert again.publish() == 3
    assert engine.loaded == [("adapter", "step_3", 3)]
    broadcast(tmp_path, 4)
    again.train(batch)
    assert sent(tmp_path) == ["step_4"]


def test_a_resume_without_checkpoint_samples_from_the_trainers_weights(drawing, broadcast, backend, batch, tmp_path):
    made, _ = backend()
    broadcast(tmp_path, 1)
    made.train(batch)
    again, engine = backend(1)
    assert again.sample(*drawing)[0][0].policy_version == 1
    assert engine.loaded == [("adapter", "step_1", 1)]


def test_a_resume_waits_for_the_step_that_was_under_way(broadcast, backend, batch, tmp_path):
    made, _ = backend(sync_timeout="stale")
    made.train(batch)
    saved = tmp_path / "saved"
    saved.mkdir()
    made.save(saved)
    threading.Timer(0.3, lambda: broadcast(tmp_path, 1)).start()
    again, _ = backend(1, sync_wait_s=20.0)
    again.load(saved)
    assert again.publish() == 1


def test_a_step_that_left_unnoted_is_believed_by_its_weights(
    sent, drawing, broadcast, backend, batch, tmp_path, caplog
):
    broadcast(tmp_path, 5)
    made, _ = backend(4)
    with caplog.at_level(logging.WARNING, "retrain"):
        assert made.sample(*drawing)[0][0].policy_version == 5
    assert "has done 5 steps, but only 4 are recorded" in caplog.text
    broadcast(tmp_path, 6)
    made.train(batch)
    assert sent(tmp_path) == ["step_6"]
    assert json.loads((tmp_path / "retrain_steps.json").read_text()) == {"steps_sent": 6}


def test_first_step_wins_over_the_checkpoint(broadcast, backend, tmp_path):
    saved = tmp_path / "saved"
    saved.mkdir()
    state = {"output_dir": str(tmp_path), "steps_sent": 9, "policy_version": 9, "stale_steps": 0}
    (saved / STATE).write_text(json.dumps(state))
    broadcast(tmp_path, 4)
    made, _ = backend(4, first_step=5)
    made.load(saved)
    assert made.publish() == 4


@pytest.mark.parametrize(
    "text", [None, "", "{}", "[]", '{"steps_sent": 1, "output_dir": "/elsewhere", "stale_steps": 0}']
)
def test_a_state_that_does_not_fit_is_a_resume_error(backend, tmp_path, text):
    made, _ = backend()
    saved = tmp_path / "saved"
    saved.mkdir()
    if text is not None:
        (saved / STATE).write_text(text)
    with pytest.raises(ResumeError):
        made.load(saved)


def test_before_the_first_step_there_is_no_adapter_and_a_checkpoint_all_the_same(backend, tmp_path):
    made, _ = backend()
    saved = tmp_path / "saved"
    saved.mkdir()
    made.save_adapter(saved)
    made.save(saved)
    assert [file.name for file in saved.iterdir()] == [STATE]


def test_an_adapter_that_the_trainer_has_removed_is_named(broadcast, backend, batch, tmp_path):
    made, _ = backend()
    folder = broadcast(tmp_path, 1)
    made.train(batch)
    made.publish()
    (folder / "adapter_model.safetensors").unlink()
    (tmp_path / "saved").mkdir()
    with pytest.raises(BackendError, match="let the trainer keep more"):
        made.save(tmp_path / "saved")


def test_close_closes_the_engine_may_be_repeated_and_is_for_good(backend, drawing, batch, sent, tmp_path):
    made, engine = backend()
    made.close()
    made.close()
    assert engine.is_closed
    for call in (lambda: made.sample(*drawing), lambda: made.train(batch), made.publish):
        with pytest.raises(BackendError, match="the prime_rl backend is closed"):
            call()
    assert sent(tmp_path) == []
