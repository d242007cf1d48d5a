"""The window of measurements: bounded, varied, of similar lengths, and the same after a restart."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from retrain.kernel.config.plugin_tables import BackpressureTable
from retrain.run.backpressure import MAX_SAMPLES, Sample, UslPacer, Window


def sample(p: int, throughput: float = 10.0, mean_tokens: float = 50.0) -> Sample:
    return Sample(p=p, throughput=throughput, mean_tokens=mean_tokens)


def test_a_run_that_has_settled_keeps_what_it_learnt_in_the_sweep() -> None:
    window = Window()
    for p in (1, 2, 4, 8):
        window.add(sample(p))
    for number in range(500):
        window.add(sample(16, throughput=float(number)))
    assert {each.p for each in window.samples} == {1, 2, 4, 8, 16}
    assert len(window.samples) == MAX_SAMPLES
    kept = [each.throughput for each in window.samples if each.p == 16]
    assert kept == [float(number) for number in range(404, 500)]


def test_completions_of_another_length_are_left_out() -> None:
    window = Window([sample(1, mean_tokens=40.0), sample(2, mean_tokens=100.0), sample(4, mean_tokens=210.0)])
    assert window.comparable(100.0) == [(2.0, 10.0)]
    assert window.comparable(80.0) == [(1.0, 10.0), (2.0, 10.0)]


@given(st.lists(st.tuples(st.integers(1, 6), st.floats(0.1, 1e6), st.floats(0.5, 1e4)), max_size=250))
def test_the_window_is_bounded_and_survives_json(rows: list[tuple[int, float, float]]) -> None:
    window = Window()
    for p, throughput, length in rows:
        window.add(sample(p, throughput, length))
        assert window.samples[-1].p == p
    assert len(window.samples) <= MAX_SAMPLES
    assert {each.p for each in window.samples} == {p for p, _, _ in rows}
    pacer = UslPacer(BackpressureTable(), batch_size=1, group_size=1)
    pacer.restore({**pacer.state(), "samples": json.loads(json.dumps(window.state()))})
    assert pacer.state()["samples"] == window.state()
