"""What scoring costs: `python benchmarks/scoring.py [--workers N] [--json FILE]`.

1. Overhead: microseconds per score of a trivial reward through the service, against calling it in this process, with
   short texts and with texts of 40,000 characters.
2. Share of a step: a sampler that delivers 64 completions over one second, and a reward that takes 5 ms for each; the
   time after the last sample until all scores are there, as a share of the step. Also with scoring after sampling.
3. Seconds to start a scoring process, and to replace one that a completion has killed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from retrain.api import Example
from retrain.kernel.config.schema import ScoringTable
from retrain.tasks.scoring.pool import NamedReward
from retrain.tasks.scoring.service import ScoringService

COMPLETIONS, SAMPLING_S, SCORE_S = 64, 1.0, 0.005
SCORES = 2000
REPEATS = 5
REWARDS = f"""
import os, time
class Match:
    def score(self, example, text):
        return float(text[-1] == example.reference)
class Slow:
    def score(self, example, text):
        time.sleep({SCORE_S})
        return 1.0
class Deadly:
    def score(self, example, text):
        os._exit(1)
"""
EXAMPLES = [Example(id=f"example-{n}", prompt="What is 3 + 4? " * 20, reference="7") for n in range(8)]


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workers", type=int, default=0, help="scoring processes; 0 = as a run would have")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    settings = ScoringTable(workers=options.workers, cache=False, retries=0, max_failed_frac=1.0)
    figures: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "workers": options.workers,
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "benchmark_rewards.py").write_text(REWARDS, encoding="utf-8")
        sys.path.insert(0, folder)  # the processes import the rewards by name, as they would a user's
        figures |= overhead(settings) | share_of_step(settings) | starts(settings)
    for name, value in figures.items():
        print(f"{name:<28} {value:.6g}" if isinstance(value, float) else f"{name:<28} {value}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def overhead(settings: ScoringTable) -> dict[str, float]:
    """Microseconds per score, in this process and through the service."""
    reward, figures = _reward("Match"), {}
    for name, text in (("short", "so it is 7"), ("long", "so it is " * 4444 + "7")):
        pairs = [(EXAMPLES[n % 8], f"{n} {text}") for n in range(SCORES)]
        direct_s = _median_s(lambda pairs=pairs: [reward.score(*pair) for pair in pairs])
        with ScoringService([NamedReward(name="match", reward=reward)], settings) as service:
            through_s = _median_s(lambda pairs=pairs, service=service: _score(service, pairs))
        figures |= {f"direct_{name}_us": 1e6 * direct_s / SCORES, f"service_{name}_us": 1e6 * through_s / SCORES}
    return figures


def share_of_step(settings: ScoringTable) -> dict[str, float]:
    """Time between the last sample and the last score, as a share of sampling and scoring together."""
    shares, serial = [], []
    with ScoringService([NamedReward(name="slow", reward=_reward("Slow"))], settings) as service:
        _score(service, [(EXAMPLES[0], str(n)) for n in range(32)])  # all processes are up
        for _ in range(REPEATS):
            started = time.perf_counter()
            with service.batch() as batch:
                for n in range(COMPLETIONS):
                    time.sleep(max(0.0, started + SAMPLING_S * (n + 1) / COMPLETIONS - time.perf_counter()))
                    batch.submit(EXAMPLES[n % 8], f"completion {n}")
                sampled = time.perf_counter()
                batch.collect()
            ended = time.perf_counter()
            shares.append((ended - sampled) / (ended - started))
            started = time.perf_counter()
            _score(service, [(EXAMPLES[n % 8], f"completion {n}") for n in range(COMPLETIONS)])
            serial.append((time.perf_counter() - started) / (SAMPLING_S + time.perf_counter() - started))
    return {"share_overlapped": statistics.median(shares), "share_afterwards": statistics.median(serial)}


def starts(settings: ScoringTable) -> dict[str, float]:
    """Seconds until the first process is ready, and for a score that ends with the death of its process."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        with ScoringService([NamedReward(name="match", reward=_reward("Match"))], settings):
            times.append(time.perf_counter() - started)
    alone = settings.model_copy(update={"workers": 1})
    with ScoringService([NamedReward(name="deadly", reward=_reward("Deadly"))], alone) as service:
        deaths_s = _median_s(lambda: _score(service, [(EXAMPLES[0], "x")] * 10)) / 10
    return {"start_s": statistics.median(times), "death_and_restart_s": deaths_s}


def _score(service: ScoringService, pairs: list[tuple[Example, str]]) -> None:
    with service.batch() as batch:
        for example, text in pairs:
            batch.submit(example, text)
        batch.collect()


def _reward(name: str) -> Any:
    import benchmark_rewards

    return getattr(benchmark_rewards, name)()


def _median_s(work: Callable[[], object]) -> float:
    """Median time of a call after one warm-up."""
    work()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


if __name__ == "__main__":
    main()
