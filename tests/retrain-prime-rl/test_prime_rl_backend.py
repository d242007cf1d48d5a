"""The backend around real files, with an engine that notes what it is given: steps, versions, waiting."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from retrain.api import BackendError, NonFiniteError
from retrain_prime_rl.backend import STATE


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


def test_the_loss_is_called_a_placeholder_and_nothing_unknown_is_a_number(broadcast, backend, batch, tmp_path):
    made, _ = backend()
    broadcast(tmp_path, 1)
    report = made.train(batch)
    assert report.loss_is_placeholder
    unknown = ("grad_norm", "ratio_mean", "ratio_max", "gap_mean", "gap_p99", "gap_max", "k3", "ess_frac")
    assert all(getattr(report, name) is None for name in (*unknown, "clip_fraction"))
    assert not made.capabilities.reports_sync_loss


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


def test_weights_that_never_come_are_an_error_with_the_way_out(backend, batch):
    made, engine = backend(sync_wait_s=0.1)
    with pytest.raises(BackendError) as caught:
        made.train(batch)
    text = str(caught.value)
    assert "no weights with 1 steps in them within sync_wait_s = 0.1 s" in text
    assert "writes step_0 before it reads a batch" in text
    assert engine.loaded == []


def test_weights_of_an_earlier_step_are_not_taken_for_the_new_ones(broadcast, backend, batch, tmp_path):
    made, _ = backend()
    broadcast(tmp_path, 1)
    made.train(batch)
    made.publish()
    with pytest.raises(BackendError, match="the newest complete ones have 1"):
        made.train(batch)


def wait_in_vain(made, batch) -> str:
    with pytest.raises(BackendError) as caught:
        made.train(batch)
    return str(caught.value)


def test_a_trainer_that_has_started_and_does_not_read_is_asked_for_its_transport(broadcast, backend, batch, tmp_path):
    broadcast(tmp_path, 0)
    text = wait_in_vain(backend()[0], batch)
    assert str(tmp_path / "rollouts" / "step_1") in text
    assert '[rollout_transport] type = "filesystem"' in text


def test_weights_that_are_being_written_are_waited_for_longer(broadcast, backend, batch, tmp_path):
    broadcast(tmp_path, 0)
    (broadcast(tmp_path, 1) / "STABLE").unlink()
    text = wait_in_vain(backend()[0], batch)
    assert "step_1 has neither .finished nor STABLE" in text
    assert "raise sync_wait_s" in text


def test_a_trainer_that_waits_for_a_batch_that_is_gone_is_told_the_file(broadcast, backend, batch, tmp_path):
    broadcast(tmp_path, 1)
    text = wait_in_vain(backend(3)[0], batch)
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


def test_the_end_says_what_the_trainer_waits_for(broadcast, backend, batch, tmp_path, caplog):
    made, _ = backend()
    broadcast(tmp_path, 1)
    made.train(batch)
    with caplog.at_level(logging.INFO, "retrain"):
        made.close()
        made.close()
    assert caplog.text.count("was sent 1 steps and waits for step 2") == 1


def test_torn_weights_are_named_in_the_error(broadcast, backend, batch, tmp_path):
    file = broadcast(tmp_path, 1) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    made, _ = backend()
    with pytest.raises(BackendError, match=r"adapter_model\.safetensors has"):
        made.train(batch)


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


def test_metrics_say_how_the_step_travelled_once(broadcast, backend, batch, tmp_path):
    made, _ = backend()
    broadcast(tmp_path, 1)
    made.train(batch)
    measured = made.metrics()
    assert measured["prime_rl_step"] == 1
    assert measured["prime_rl_enqueue_time_s"] > 0.0
    assert measured["prime_rl_sync_time_s"] > 0.0
    assert made.metrics() == {}  # a step without informative groups sends nothing


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


def test_a_skipped_step_of_ours_leaves_no_hole(sent, broadcast, backend, make_batch, tmp_path):
    made, _ = backend()
    for ours, theirs in ((0, 1), (3, 2), (9, 3)):
        broadcast(tmp_path, theirs)
        made.train(make_batch([6, 9], step=ours))
        assert made.publish() == theirs
    assert sent(tmp_path) == ["step_3"]


def test_a_batch_that_cannot_be_sent_takes_no_number(sent, broadcast, backend, make_batch, batch, tmp_path):
    made, _ = backend()
    broken = make_batch([6, 6])
    broken.rows[0].advantages_T[-1] = np.nan
    with pytest.raises(NonFiniteError):
        made.train(broken)
    with pytest.raises(BackendError):
        made.train(make_batch([65]))
    broadcast(tmp_path, 1)
    made.train(batch)
    assert sent(tmp_path) == ["step_1"]


def test_a_sampler_that_is_stale_all_the_same_is_an_error(drawing, broadcast, backend, batch, tmp_path):
    made, engine = backend()
    engine.is_stuck = True
    broadcast(tmp_path, 1)
    made.train(batch)
    made.publish()
    with pytest.raises(BackendError, match=r"policy version \[0\] instead of 1"):
        made.sample(*drawing)
