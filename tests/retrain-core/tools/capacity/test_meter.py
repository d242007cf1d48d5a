"""What is measured: peaks that only rise, charged to the phase that raised them, and a median of a bounded list."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np

from retrain.tools.capacity.watch import RECENT_STEPS, Meter, peak_bytes, resident_bytes

BLOCK = 200 * 2**20


# In a process of its own: one that has run other tests would have to exceed their peak, which is gigabytes.
PEAKS = """
import json, sys
import numpy as np
from retrain.tools.capacity.watch import Meter, peak_bytes

meter = Meter()
meter.enter("sampling")
block = np.ones(peak_bytes() + int(sys.argv[1]), dtype=np.uint8)
meter.enter("training")
del block
meter.enter("recording")
json.dump(meter.measured(), sys.stdout, allow_nan=False)
"""


def test_a_phase_is_charged_with_the_peak_that_it_reached() -> None:
    command = [sys.executable, "-c", PEAKS, str(BLOCK)]
    measured = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    phases = measured["peak_memory_bytes_by_phase"]
    assert phases["sampling"] >= phases.get("start", 0) + BLOCK // 2
    assert measured["peak_memory_bytes"] >= phases["sampling"]
    assert "training" not in phases
    assert "median_step_time_s" not in measured


def test_what_is_resident_is_no_more_than_the_peak() -> None:
    assert 2**20 < resident_bytes() <= peak_bytes() * 1.05


def test_the_first_step_is_not_in_the_median_and_old_ones_are_forgotten() -> None:
    meter = Meter()
    meter.step(100.0)
    assert meter.measured()["median_step_time_s"] == 100.0
    meter.step(1.0)
    meter.step(3.0)
    assert meter.measured()["median_step_time_s"] == 2.0
    for _ in range(3 * RECENT_STEPS):
        meter.step(5.0)
    assert meter.measured()["steps"] == RECENT_STEPS


def test_lengths_are_the_longest_seen() -> None:
    meter = Meter()
    meter.step(1.0)
    meter.saw(20, 7)
    meter.saw(10, 9)
    measured = meter.measured()
    assert (measured["longest_prompt_tokens"], measured["longest_completion_tokens"]) == (20, 9)


def test_a_large_parent_is_not_charged_to_its_child() -> None:
    block = np.ones(2 * BLOCK, dtype=np.uint8)
    program = "from retrain.tools.capacity.watch import peak_bytes; print(peak_bytes())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 2**20 < int(done.stdout) < len(block)
