"""The garbage collector pauses while a run is built, works while it runs, and is restored afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from retrain.run.collector import paused_collector, resume_collector


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_it_rests_until_it_is_resumed() -> None:
    with paused_collector():
        assert not gc.isenabled()
        kept = [[] for _ in range(100)]
        resume_collector()
        assert gc.isenabled()
        assert gc.get_freeze_count() > len(kept)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_what_is_made_after_it_was_resumed_is_collected() -> None:
    with paused_collector():
        resume_collector()
        ring: list[object] = []
        ring.append(ring)
        del ring
        assert gc.collect() >= 1


def test_an_error_leaves_it_as_it_was_and_a_disabled_one_stays_disabled() -> None:
    with pytest.raises(ValueError, match="inside"), paused_collector():
        raise ValueError("inside")
    assert gc.isenabled()
    resume_collector()  # nothing was paused
    assert gc.get_freeze_count() == 0
    gc.disable()
    with paused_collector():
        assert not gc.isenabled()
    assert not gc.isenabled()
