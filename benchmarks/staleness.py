"""What sampling ahead saves where batches take unequal times: `python benchmarks/staleness.py [--spread S ...]`.

The loop's own arrangements (in turn, one step, n steps) with a sampler and a trainer that only sleep. Training takes
50 ms, sampling 50 ms on average, log-normal with standard deviation S of its logarithm; the same times for every n.
Neither uses the processor, so other load of the machine matters little.
"""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from retrain.kernel.parts import Planned, Sampled, Serial
from retrain.kernel.progress import Clock, Progress
from retrain.run.steps.overlapped import Buffered, Overlapped

MEAN_S = 0.05


class Sleeping:
    """A backend without a policy."""

    version = 0

    def publish(self) -> int:
        return self.version

    def use_version(self, version: int) -> None:
        pass


def measure(most: int, durations_s: np.ndarray) -> dict[str, float]:
    """Seconds of a run, and of these without training and without sampling."""

    def sample(planned: Planned, clock: Clock) -> Sampled:
        with clock.timed("sample"):
            time.sleep(durations_s[planned.step])
        return Sampled(prompts=[])

    def train(batch: Any) -> None:
        time.sleep(MEAN_S)
        Sleeping.version += 1

    backend, steps = Sleeping(), len(durations_s)
    stops = SimpleNamespace(exposed=lambda work: work())
    config = SimpleNamespace(training=SimpleNamespace(max_steps=steps))
    parts: Any = SimpleNamespace(backend=backend, train=train, config=config)
    run: Any = SimpleNamespace(parts=parts, progress=Progress(), enter=lambda step, phase: None, stops=stops)
    if most < 2:
        loop = Overlapped(run, sample) if most else Serial(parts.backend, train, sample)
    else:
        loop = Buffered(run, sample, backend, most)

    def planned(step: int) -> Planned | None:
        return Planned(step=step, cursor=0, batch_size=1) if step < steps else None

    started = time.perf_counter()
    loop.start(Clock(), lambda: planned(0), is_restored=False)
    for step in range(steps):
        clock = Clock()
        loop.collect(planned(step), clock)
        loop.train(None, clock, lambda step=step: planned(step + 1))
        loop.finish(clock, has_trained=True)
    total_s = time.perf_counter() - started
    loop.close()
    return {"total": total_s, "trainer": total_s - steps * MEAN_S, "sampler": total_s - float(durations_s.sum())}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spread", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    print("| spread | max_staleness | seconds | trainer idle | sampler idle |\n|---|---|---|---|---|")
    for spread in options.spread:
        normal = np.random.default_rng(1).standard_normal(options.steps)
        durations_s = np.exp(spread * normal)
        durations_s *= MEAN_S / durations_s.mean()
        for most in (0, 1, 2, 4, 8):
            found = measure(most, durations_s)
            print(f"| {spread:g} | {most} | {found['total']:.2f} | {found['trainer']:.2f} | {found['sampler']:.2f} |")


if __name__ == "__main__":
    main()
