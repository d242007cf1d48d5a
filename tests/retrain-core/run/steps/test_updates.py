"""Several optimizer steps per batch of samples: minibatches, reports, faults, stops, and the rate of each step."""

import logging
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.kernel.config.load import load_config
from retrain.kernel.errors import BackendError, NonFiniteError, OutOfMemoryError, Problem, StopRequested
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import TrainBatch, TrainReport, TrainRow
from retrain.run.interrupts import Interrupts
from retrain.run.steps.updates import Course, Updates
from retrain.run.tables import registered_tables
from tests.kit.problems import refused

TABLES = registered_tables(load_plugins({}))


def configured(**values):
    """A configuration; `optimizer__schedule="linear"` sets `[optimizer] schedule`."""
    arguments = [f"--set={path.replace('__', '.')}={value}" for path, value in values.items()]
    config, problems = load_config(None, tables=TABLES, arguments=arguments, environ={})
    assert not problems
    return config


def row(group, number, *, tokens=3):
    """A row of `tokens` actions after one prompt token, recognisable by its tokens."""
    return TrainRow(
        tokens_T=np.array([0, *[100 * group + number] * tokens]),
        action_T=np.arange(tokens + 1) > 0,
        logprobs_T=np.full(tokens + 1, -1.0),
        advantages_T=np.ones(tokens + 1),
        group=group,
    )


def batch_of(groups, rows=2, *, step=0, num_masked=0):
    given_rows = tuple(row(group, number, tokens=1 + group) for group in range(groups) for number in range(rows))
    return TrainBatch(step=step, rows=given_rows, temperature=1.0, num_masked=num_masked)


class Recorder:
    """A backend that remembers its batches; `failures` are raised in these updates."""

    def __init__(self, failures=None, *, follows=True):
        self.batches = []
        self.measured = []  # after how many updates log-probabilities were asked for
        self.failures, self.follows = failures or {}, follows
        self.act = lambda batch: None

    def train(self, batch):
        self.act(batch)
        if error := self.failures.get(batch.update):
            raise error
        self.batches.append(batch)
        number = len(self.batches)
        gaps_N = np.full(batch.num_actions, 0.1 * (number - 1))
        lr = 0.5 if batch.lr is None else batch.lr
        report = TrainReport.measured(loss=float(number), grad_norm=float(number), gaps_N=gaps_N, clipped=number - 1)
        return replace(report, lr=lr if self.follows else None)

    def logprobs(self, rows, temperature):
        self.measured.append(len(self.batches))
        return [np.where(each.action_T, -2.0, 0.0) for each in rows]


def updates_of(backend, stops=None, seed=1, **values):
    return Updates(configured(**values), backend, Seeds(seed), stops or Interrupts(grace_s=30.0))


def partition(batches):
    """The groups of each minibatch, in the order of its rows."""
    return [tuple(dict.fromkeys(each.group for each in batch.rows)) for batch in batches]


def test_one_update_gets_the_whole_batch_and_masked_sequences_follow_their_group():
    backend, batch = Recorder(), batch_of(4, num_masked=3)
    report = updates_of(backend).train(batch)
    (seen,) = backend.batches
    assert seen.rows is batch.rows
    assert (seen.lr, seen.num_masked, seen.update, seen.updates) == (None, 3, 0, 1)
    assert (report.updates, report.clip_fractions, report.rejected) == (1, (), "")
    assert not backend.measured
    backend, batch = Recorder(), batch_of(4, num_masked=9)
    batch = replace(batch, masked_groups=(0, 0, 0, 2, 3, 7, 7))  # nothing else is left of group 7, and two are unknown
    updates_of(backend, training__minibatches=4).train(batch)
    masked = {groups: each.num_masked for groups, each in zip(partition(backend.batches), backend.batches, strict=True)}
    assert masked == {(0,): 4, (1,): 1, (2,): 2, (3,): 2}


@given(
    groups=st.integers(1, 9),
    minibatches=st.integers(1, 5),
    epochs=st.integers(1, 3),
    masked=st.integers(0, 7),
    step=st.integers(0, 3),
)
def test_every_epoch_trains_every_row_once_and_keeps_groups_together(groups, minibatches, epochs, masked, step):
    backend, batch = Recorder(), batch_of(groups, rows=3, step=step, num_masked=masked)
    report = updates_of(backend, training__minibatches=minibatches, training__epochs=epochs).train(batch)
    per_epoch = min(minibatches, groups)
    assert [each.update for each in backend.batches] == list(range(per_epoch * epochs))
    assert {each.updates for each in backend.batches} == {per_epoch * epochs} == {report.updates}
    place = {id(each): number for number, each in enumerate(batch.rows)}
    for epoch in range(epochs):
        part = backend.batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        order = [[place[id(each)] for each in one.rows] for one in part]
        assert sorted(number for one in order for number in one) == list(range(len(batch.rows)))
        assert all(one == sorted(one) for one in order)
        seen = [group for one in partition(part) for group in one]
        assert len(seen) == len(set(seen)) == groups
        sizes = [len(one) for one in partition(part)]
        assert max(sizes) - min(sizes) <= 1
        assert sum(one.num_masked for one in part) == masked
    assert report.num_tokens == batch.num_actions


def test_the_minibatches_are_drawn_by_seed_step_and_epoch():
    def drawn(seed, step):
        backend = Recorder()
        updates_of(backend, seed=seed, training__minibatches=2, training__epochs=2).train(batch_of(8, step=step))
        return partition(backend.batches)

    assert drawn(1, 0) == drawn(1, 0)
    first = drawn(1, 0)
    assert first[:2] != first[2:]
    assert len({tuple(each) for each in (first, drawn(1, 1), drawn(2, 0))}) == 3


def test_the_report_of_a_step_is_made_from_those_of_its_updates():
    backend = Recorder()
    report = updates_of(backend, training__minibatches=3, training__epochs=2).train(batch_of(3))
    tokens = np.array([each.num_actions for each in backend.batches])
    clipped = np.arange(6)
    assert report.updates == 6
    assert report.clip_fractions == pytest.approx(tuple(clipped / tokens))
    assert report.clip_fraction == pytest.approx(clipped.sum() / tokens.sum())
    assert report.loss == pytest.approx((np.arange(1, 7) * tokens).sum() / tokens.sum())
    assert report.grad_norm == pytest.approx(3.5)
    assert report.num_tokens == tokens[:3].sum()
    assert (report.ratio_mean, report.gap_max) == (1.0, 0.0)  # of the first update, which is on policy


def test_a_step_ends_at_an_update_that_is_not_finite():
    error = NonFiniteError(Problem(what="the loss is nan"))
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        updates_of(Recorder({0: error}), training__minibatches=2).train(batch_of(4))
    backend = Recorder({2: error})
    report = updates_of(backend, training__minibatches=2, training__epochs=2).train(batch_of(4))
    assert (report.updates, report.rejected) == (2, "update 3 of 4: the loss is nan")
    assert len(report.clip_fractions) == 2
    assert np.isfinite(report.loss)
    memory = OutOfMemoryError(Problem(what="out of memory"))
    with pytest.raises(OutOfMemoryError):
        updates_of(Recorder({0: memory}), training__minibatches=2).train(batch_of(4))
    with pytest.raises(BackendError, match="out of memory") as caught:  # too late to try it again with fewer prompts
        updates_of(Recorder({1: memory}), training__minibatches=2).train(batch_of(4))
    assert not isinstance(caught.value, OutOfMemoryError)


def test_fewer_groups_than_minibatches_are_told_once(caplog):
    backend = Recorder()
    updates = updates_of(backend, training__minibatches=4)
    with caplog.at_level(logging.WARNING, logger="retrain"):
        for step in range(3):
            updates.train(batch_of(2, step=step))
    assert len(backend.batches) == 6
    (told,) = (record.getMessage() for record in caplog.records)
    assert told.startswith("minibatches = 4, but step 0 trains only 2 groups")


def test_the_importance_weight_compares_with_the_trainer_before_the_first_update():
    given_batch = batch_of(2)
    served = replace(given_batch.rows[0], engine_logprobs_T=np.full(2, -3.0))
    given_batch = replace(given_batch, rows=(served, *given_batch.rows[1:]))
    backend = Recorder()
    updates_of(backend, training__epochs=2, algorithm__tis_cap=2.0).train(given_batch)
    assert backend.measured == [0]
    for batch in backend.batches:
        assert [each.logprobs_T.tolist() for each in batch.rows[:2]] == [[0.0, -2.0]] * 2
        assert [each.engine_logprobs_T.tolist() for each in batch.rows[:2]] == [[-3.0, -3.0], [-1.0, -1.0]]
    for values in ({"training__epochs": 2}, {"algorithm__tis_cap": 2.0}):
        plain = Recorder()
        updates_of(plain, **values).train(given_batch)
        assert plain.measured == []
        assert plain.batches[-1].rows == given_batch.rows
    unable = Recorder()
    unable.logprobs = None
    assert refused(updates_of(unable, training__epochs=2, algorithm__tis_cap=2.0).train, given_batch) == [
        "backend.no-logprobs"
    ]
    assert not unable.batches


def test_a_backend_that_does_not_follow_the_schedule_ends_the_run():
    course = {"optimizer__schedule": "linear"}
    assert updates_of(Recorder(), **course).train(batch_of(1)).lr == 4e-5
    assert updates_of(Recorder(follows=False)).train(batch_of(1)).lr is None
    assert refused(updates_of(Recorder(follows=False), **course).train, batch_of(1)) == ["backend.no-schedule"]


@pytest.mark.parametrize("stopped_in", [0, 1])
def test_a_stop_waits_for_the_updates_that_follow_the_first(stopped_in):
    stops, elsewhere = Interrupts(grace_s=30.0), list[str]()

    def check_elsewhere():
        with pytest.raises(StopRequested):
            stops.check()
        elsewhere.append("stopped")

    def act(batch):
        if batch.update == stopped_in:
            stops.request("SIGTERM")
        stops.check()
        if batch.update == 3:
            thread = threading.Thread(target=check_elsewhere)
            thread.start()
            thread.join()

    backend = Recorder()
    backend.act = act
    reports = []
    with stops.installed(), pytest.raises(StopRequested), stops.shield():
        reports.append(updates_of(backend, stops, training__minibatches=4).train(batch_of(4)))
    assert [report.updates for report in reports] == [4][:stopped_in]
    assert len(backend.batches) == 4 * stopped_in
    assert elsewhere == ["stopped"][:stopped_in]


FACTORS = {  # warm-up 2, 10 steps
    "constant": [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "linear": [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125],
    "cosine": [0.5, 1, 1, 0.96194, 0.853553, 0.691342, 0.5, 0.308658, 0.146447, 0.03806],
}


@pytest.mark.parametrize("schedule", FACTORS)
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_the_rates_of_the_schedules(schedule, floor):
    course = Course(lr=0.5, max_steps=10, schedule=schedule, warmup_steps=2, min_lr_ratio=floor)
    wanted = [0.5 * (factor * (1 - floor) + floor) for factor in FACTORS[schedule]]
    assert [course.rate(step) for step in range(10)] == pytest.approx(wanted, abs=1e-6)


def test_what_a_course_says_of_itself():
    assert (str(Course(lr=1e-3, max_steps=5)), Course(lr=1e-3, max_steps=5).is_constant) == ("constant", True)
    endless = Course(lr=1.0, max_steps=3, warmup_steps=5)
    assert (endless.is_constant, endless.falls) == (False, False)
    assert [endless.rate(step) for step in range(3)] == pytest.approx([0.2, 0.4, 0.6])
    assert endless.warning == "warmup_steps = 5, max_steps = 3: the learning rate never reaches lr"
    whole = Course(lr=1.0, max_steps=3, warmup_steps=3, schedule="linear", min_lr_ratio=0.5)
    assert (whole.warning, whole.falls, whole.rate(2)) == ("", True, 1.0)
    assert str(whole) == "linear, from 1 down to 0.5 within 3 steps, after 3 steps of warm-up"
