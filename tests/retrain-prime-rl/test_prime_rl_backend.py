"""The backend around real files, with an engine that notes what it is given: steps, versions, waiting."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from retrain.api import BackendError, NonFiniteError, ResumeError
from retrain_prime_rl import trainer_folder
from retrain_prime_rl.backend import STATE
from retrain_prime_rl.transport import rank_files


def test_a_step_goes_out_its_weights_come_in_and_are_sampled_from(sent, drawing, broadcast, backend, batch, tmp_path):
    made, engine = backend()
    assert made.sample(*drawing)[0][0].policy_version == 0
    assert engine.loaded == []  # the base model is the policy
    broadcast(tmp_path, 1)
    report = made.train(batch)
    assert engine.loaded == []  # not before `publish`
    assert made.publish() == 1
    assert engine.loaded == [("adapter", "step_1", 1)]
    assert {sample.policy_version for sample in made.sample(*drawing)[0]} == {1}
    assert made.publish() == 1
    assert len(engine.loaded) == 1
    assert sent(tmp_path) == ["step_1"]
    assert report.num_tokens == batch.num_actions
    assert report.loss_is_placeholder
    unknown = ("grad_norm", "ratio_mean", "ratio_max", "gap_mean", "gap_p99", "gap_max", "k3", "ess_frac", "lr")
    assert all(getattr(report, name) is None for name in (*unknown, "clip_fraction"))
    assert not made.capabilities.reports_sync_loss
    measured = made.metrics()
    assert measured["prime_rl_step"] == 1
    assert measured["prime_rl_enqueue_time_s"] > 0.0
    assert measured["prime_rl_sync_time_s"] > 0.0
    assert made.metrics() == {}  # a step without informative groups sends nothing


def test_all_weights_take_the_other_route(broadcast, backend, batch, tmp_path):
    made, engine = backend()
    folder = broadcast(tmp_path, 1, is_adapter=False)
    made.train(batch)
    made.publish()
    assert engine.loaded == [("weights", "step_1", 1)]
    with pytest.raises(BackendError, match="trains all weights"):
        made.save_adapter(tmp_path)
    (tmp_path / "saved").mkdir()
    made.save(tmp_path / "saved")  # a checkpoint all the same: the weights are the trainer's to keep
    assert [file.name for file in (tmp_path / "saved").iterdir()] == [STATE]
    assert folder.exists()


def test_the_error_after_a_wait_in_vain_says_what_the_trainer_lacks(broadcast, backend, batch, tmp_path):
    def waited(sent: int = 0, **options) -> str:
        with pytest.raises(BackendError) as caught:
            backend(sent, **options)[0].train(batch)
        shutil.rmtree(tmp_path / "rollouts")
        return str(caught.value)

    text = waited(sync_wait_s=0.1)
    assert "no weights with 1 steps in them within sync_wait_s = 0.1 s" in text
    assert "writes step_0 before it reads a batch" in text
    broadcast(tmp_path, 0)  # it has started, and reads batches somewhere else
    text = waited()
    assert str(tmp_path / "rollouts" / "step_1") in text
    assert '[rollout_transport] type = "filesystem"' in text
    broadcast(tmp_path, 1, stable=False)
    text = waited()
    assert "step_1 has neither .finished nor STABLE" in text
    assert "raise sync_wait_s" in text
    file = broadcast(tmp_path, 1) / "adapter_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    assert "adapter_model.safetensors has" in waited()
    file.write_bytes(whole)
    assert "the newest complete ones have 1" in waited(1)
    text = waited(3)
    assert f"waits for {tmp_path / 'rollouts' / 'step_2'}, and it is missing" in text
    assert "resume the run with first_step = 2" in text


def test_batches_that_the_trainer_has_behind_it_are_removed(sent, broadcast, backend, batch, tmp_path):
    made, _ = backend()
    for step in range(1, 5):
        broadcast(tmp_path, step)
        made.train(batch)
        assert sent(tmp_path) == [f"step_{step}"]
    checkpoint = tmp_path / "checkpoints" / "step_4" / "trainer"
    checkpoint.mkdir(parents=True)
    (checkpoint / ".metadata").touch()
    for step in range(5, 8):  # a trainer that is restarted from there reads them again
        broadcast(tmp_path, step)
        made.train(batch)
    assert sent(tmp_path) == ["step_5", "step_6", "step_7"]


def test_stale_steps_go_on_by_key_are_counted_and_told(sent, broadcast, backend, batch, tmp_path, caplog):
    made, engine = backend(sync_timeout="stale")
    with caplog.at_level(logging.WARNING, "retrain"):
        made.train(batch)
    assert made.publish() == 0
    assert "Sampling continues with version 0" in caplog.text
    assert made.metrics()["prime_rl_policy_lag"] == 1
    made.train(batch)
    measured = made.metrics()
    assert (measured["prime_rl_policy_lag"], measured["prime_rl_stale_steps"]) == (2, 2)
    broadcast(tmp_path, 2)
    broadcast(tmp_path, 3)
    made.train(batch)
    assert made.publish() == 3
    measured = made.metrics()
    assert (measured["prime_rl_policy_lag"], measured["prime_rl_stale_steps"]) == (0, 2)
    assert engine.loaded == [("adapter", "step_3", 3)]
    assert sent(tmp_path) == ["step_3"]


def test_each_update_of_a_step_is_a_step_of_the_trainer(sent, broadcast, backend, batch, tmp_path):
    made, engine = backend()
    enqueued = []
    for update in range(3):
        broadcast(tmp_path, update + 1)
        report = made.train(replace(batch, update=update, updates=3))
        enqueued.append(made.measured["prime_rl_enqueue_time_s"])
    assert report.lr is None
    assert enqueued == sorted(enqueued)
    assert made.publish() == 3
    assert engine.loaded == [("adapter", "step_3", 3)]
    assert sent(tmp_path) == ["step_3"]
    measured = made.metrics()
    assert (measured["prime_rl_step"], measured["prime_rl_enqueue_time_s"]) == (3, enqueued[-1])
    made.measured = {"prime_rl_enqueue_time_s": 1e6, "prime_rl_sync_time_s": 1e6}
    broadcast(tmp_path, 4)
    made.train(batch)  # the next step counts from zero
    measured = made.metrics()
    assert max(measured["prime_rl_enqueue_time_s"], measured["prime_rl_sync_time_s"]) < 1e6


def test_neither_a_skipped_step_nor_a_batch_that_cannot_be_sent_takes_a_number(
    sent, broadcast, backend, make_batch, batch, tmp_path
):
    made, _ = backend()
    broken = make_batch([6, 6])
    broken.rows[0].advantages_T[-1] = np.nan
    with pytest.raises(NonFiniteError):
        made.train(broken)
    with pytest.raises(BackendError):
        made.train(make_batch([65]))
    for ours, theirs in ((0, 1), (3, 2), (9, 3)):
        broadcast(tmp_path, theirs)
        made.train(replace(batch, step=ours))
        assert made.publish() == theirs
    assert sent(tmp_path) == ["step_3"]


def test_a_sampler_that_is_stale_all_the_same_is_an_error(drawing, broadcast, backend, batch, tmp_path):
    made, engine = backend()
    engine.is_stuck = True
    broadcast(tmp_path, 1)
    made.train(batch)
    made.publish()
    with pytest.raises(BackendError, match=r"policy version \[0\] instead of 1"):
        made.sample(*drawing)


# ---------------------------------------------------------------- checkpoints, and a run that goes on


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    return folder


def test_save_and_load_go_on_with_the_trainer_where_it_is(sent, broadcast, backend, batch, tmp_path, caplog, saved):
    made, _ = backend()
    for step in (1, 2):
        broadcast(tmp_path, step)
        made.train(batch)
        made.publish()
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


def test_a_resume_waits_for_the_step_that_was_under_way(broadcast, backend, batch, tmp_path, saved):
    made, _ = backend(sync_timeout="stale")
    made.train(batch)
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


def test_first_step_wins_over_the_checkpoint(broadcast, backend, tmp_path, saved):
    state = {"output_dir": str(tmp_path), "steps_sent": 9, "policy_version": 9, "stale_steps": 0}
    (saved / STATE).write_text(json.dumps(state))
    broadcast(tmp_path, 4)
    made, _ = backend(4, first_step=5)
    made.load(saved)
    assert made.publish() == 4


def test_a_state_that_does_not_fit_is_a_resume_error(backend, saved):
    made, _ = backend()
    made.save_adapter(saved)
    made.save(saved)
    assert [file.name for file in saved.iterdir()] == [STATE], "before the first step there is no adapter"
    for text in ("", "{}", "[]", '{"steps_sent": 1, "output_dir": "/elsewhere", "stale_steps": 0}', None):
        (saved / STATE).write_text(text) if text is not None else (saved / STATE).unlink()
        with pytest.raises(ResumeError):
            made.load(saved)


def test_an_adapter_that_the_trainer_has_removed_is_named(broadcast, backend, batch, tmp_path, saved):
    made, _ = backend()
    folder = broadcast(tmp_path, 1)
    made.train(batch)
    made.publish()
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(BackendError, match="let the trainer keep more"):
        made.save(saved)


def test_close_says_what_the_trainer_waits_for_may_be_repeated_and_is_for_good(
    broadcast, backend, drawing, batch, sent, tmp_path, caplog
):
    made, engine = backend()
    broadcast(tmp_path, 1)
    made.train(batch)
    with caplog.at_level(logging.INFO, "retrain"):
        made.close()
        made.close()
    assert caplog.text.count("was sent 1 steps and waits for step 2") == 1
    assert engine.is_closed
    for call in (lambda: made.sample(*drawing), lambda: made.train(batch), made.publish):
        with pytest.raises(BackendError, match="the prime_rl backend is closed"):
            call()
    assert sent(tmp_path) == ["step_1"]
