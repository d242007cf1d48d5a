"""Both overlaps, tried without a run: any `max_staleness`, any speeds, any resume, and steps that change nothing."""

import random
import sys
import threading
import time
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import AlgorithmTable, BackendTable, TrainingTable
from retrain.kernel.parts import Planned, Sampled
from retrain.kernel.progress import Clock, Progress
from retrain.run.steps.overlapped import Buffered, Overlapped, meaning, overlap_s
from retrain.run.steps.staleness import too_many


class Policies:
    """A backend whose policy is its version; it keeps the last n + 1, and says which one sampled."""

    def __init__(self, most):
        self.most, self.version, self.in_use = most, 0, -1
        self.kept = [0]

    def publish(self):
        self.kept = [*(each for each in self.kept if each != self.version), self.version][-self.most - 1 :]
        return self.version

    def use_version(self, version):
        assert version in self.kept
        self.in_use = version


def run_of(policies, train, num_steps, progress=None):
    training = SimpleNamespace(max_steps=num_steps)
    parts = SimpleNamespace(backend=policies, train=train, config=SimpleNamespace(training=training))
    stops = SimpleNamespace(exposed=lambda call: call())
    return SimpleNamespace(parts=parts, progress=progress or Progress(), enter=lambda step, phase: None, stops=stops)


def steps_of(most, trains, delays, progress, policies):
    """The policy version and the first prompt that every step from `progress.step` on was sampled with."""
    seen, begun = [], []

    def pause():
        time.sleep(delays.choice([0.0, 0.0, 0.001]))

    def sample(planned, clock):
        begun.append(planned.step)
        pause()
        with clock.timed("sample"):
            prompts = [planned.step] * (1 + planned.step % 2)  # rounds of `refill` take further prompts
        return Sampled(prompts=prompts, metrics={"version": policies.in_use, "cursor": planned.cursor})

    def train(batch):
        pause()
        policies.version += 1

    buffered = Buffered(run_of(policies, train, len(trains), progress), sample, policies, most)

    def upcoming():
        first = Planned(step=progress.step, cursor=progress.example_idx, batch_size=1)
        return first if first.step < len(trains) else None

    buffered.start(Clock(), upcoming, is_restored=True)
    try:
        while progress.step < len(trains):
            clock, before = Clock(), policies.version
            planned = Planned(step=progress.step, cursor=progress.example_idx, batch_size=1)
            sampled = buffered.collect(planned, clock)
            metrics = sampled.metrics
            seen.append((progress.step, int(metrics["version"]), int(metrics["cursor"])))
            assert before - metrics["version"] <= most
            progress.example_idx += len(sampled.prompts)
            if trains[progress.step]:
                buffered.train(SimpleNamespace(), clock, upcoming)
            fields = buffered.finish(clock, has_trained=trains[progress.step])
            assert all(value >= -1e-6 for value in fields.values())
            if delays.random() < 0.2:
                with buffered.evaluation():
                    assert policies.in_use == policies.version
            progress.step += 1
            if delays.random() < 0.1:
                break  # interrupted: a later run continues
    finally:
        buffered.close()
    assert max(begun) < len(trains), "no step beyond the last is sampled"
    return seen


@settings(max_examples=25, deadline=None)
@given(most=st.integers(2, 6), trains=st.lists(st.booleans(), min_size=1, max_size=12), seed=st.integers(0, 2**32))
def test_step_s_is_sampled_with_the_policy_after_s_minus_n_steps(most, trains, seed):
    """Every step once and in order, whatever the speeds, and wherever the run is interrupted and resumed."""
    progress, policies, seen = Progress(), Policies(most), []
    delays = random.Random(seed)
    while progress.step < len(trains):
        progress = Progress(**asdict(progress))
        seen += steps_of(most, trains, delays, progress, policies)
    after = np.cumsum([0, *trains])  # version after so many steps
    cursors = np.cumsum([0, *(1 + step % 2 for step in range(len(trains)))])
    assert seen == [(step, after[max(0, step - most)], cursors[step]) for step in range(len(trains))]


def test_an_evaluation_waits_for_no_batch_but_the_one_under_way():
    """Others have been ordered, and their thread is quicker to ask for the turn than one that has to wake up."""
    began, caller = [], threading.get_ident()

    def sample(planned, clock):
        began.append(planned.step)
        while not planned.step and sys._current_frames()[caller].f_code.co_name != "evaluation":
            time.sleep(0.01)
        time.sleep(0.02)
        return Sampled(prompts=[0])

    policies = Policies(4)
    buffered = Buffered(run_of(policies, lambda batch: None, 9), sample, policies, 4)
    buffered.start(Clock(), lambda: Planned(step=0, cursor=0, batch_size=1), is_restored=False)
    try:
        with buffered.evaluation():
            assert began == [0]
    finally:
        buffered.close()


def test_sampling_ahead_leaves_the_run_in_the_training_of_its_step():
    places = []

    def sample(planned, clock):
        run.enter(planned.step, "sampling")
        return Sampled(prompts=[0])

    policies = Policies(1)
    run = run_of(policies, lambda batch: None, 9)
    run.enter = lambda *place: places.append(place)
    overlapped = Overlapped(run, sample)
    try:
        overlapped.train(SimpleNamespace(), Clock(), lambda: Planned(step=5, cursor=0, batch_size=1))
    finally:
        overlapped.close()
    assert places == [(5, "sampling"), (4, "training")]


def test_only_a_backend_without_overlap_is_called_in_turn():
    config = Config(tables={"training": TrainingTable(max_staleness=3), "backend": BackendTable()})
    for largest, why in {0: "it samples and trains in turn", 2: ""}.items():
        assert (too_many(config, largest).code, too_many(config, largest).why) == ("backend.staleness-too-high", why)


def test_what_the_key_means_is_told_in_steps():
    for most, said in {0: "none: ", 1: "step s - 2, 1 step behind; ", 2: "step s - 3, 2 steps behind; "}.items():
        tables = {"training": TrainingTable(max_staleness=most), "algorithm": AlgorithmTable()}
        assert said in meaning(Config(tables=tables))


def test_only_common_time_counts_as_overlap():
    some, others = [(0.0, 2.0), (5.0, 9.0)], [(1.0, 1.5), (2.0, 6.0), (7.0, 8.0), (9.0, 10.0)]
    assert overlap_s(some, others) == overlap_s(others, some) == 0.5 + 1.0 + 1.0
    assert overlap_s(some, []) == 0.0
