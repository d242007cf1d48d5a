"""Stored curves for `retrain status --forecast`: `forecast_curves.py OUT.json [--seeds 4] [--limit RUNS]`.

Ten conditions of the built-in model on made sums, the same number of steps and the same 32 held-out examples x 4
samples, evaluated after every second step. Each run adds its curve to OUT.json as soon as it has ended, and a run that
is there already is not repeated, so that the script may be stopped and called again. About 15 s of one core per run.
`tests/retrain-core/verdicts/stats/curves.json` was made by it.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import retrain

STEPS, EVERY = 24, 2
BASE: dict[str, dict[str, Any]] = {
    "model": {"model": "builtin:tiny", "lora_rank": 16},
    "backend": {"backend": "local", "devices": "cpu"},
    "algorithm": {"advantage_mode": "grpo", "transform_mode": "none"},
    "training": {
        "max_steps": STEPS,
        "batch_size": 8,
        "group_size": 8,
        "max_tokens": 48,
        "temperature": 1.0,
        "lr": 3e-3,
        "save_every": 0,
    },
    "data": {"source": "arithmetic"},
    "reward": {"type": "match"},
    "eval": {"every": EVERY, "examples": 32, "samples": 4},
}
CONDITIONS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "lr=1e-3": {"lr": 1e-3},
    "lr=3e-4": {"lr": 3e-4},
    "lr=1e-2": {"lr": 1e-2},
    "maxrl": {"advantage_mode": "maxrl"},
    "maxrl+gtpo": {"advantage_mode": "maxrl", "transform_mode": "gtpo"},
    "group_size=4": {"group_size": 4},
    "group_size=16": {"group_size": 16},
    "temperature=0.7": {"temperature": 0.7},
    "lora_rank=2": {"lora_rank": 2},
}


def main() -> None:
    """Run what is missing, seed after seed, so that a stopped call leaves whole conditions balanced."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--limit", type=int, default=1000, help="runs of this call at most")
    chosen = parser.parse_args()
    stored = json.loads(chosen.out.read_text()) if chosen.out.exists() else {"about": about(), "runs": []}
    done = {(run["condition"], run["seed"]) for run in stored["runs"]}
    missing = [(name, seed) for seed in range(1, chosen.seeds + 1) for name in CONDITIONS if (name, seed) not in done]
    for name, seed in missing[: chosen.limit]:
        stored["runs"].append({"condition": name, "seed": seed, "correct": curve(name, seed)})
        chosen.out.write_text(text_of(stored))
        print(name, seed, stored["runs"][-1]["correct"], flush=True)


def curve(condition: str, seed: int) -> list[int]:
    """Right completions of each evaluation, the one before training first."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"seed": seed, "log_dir": str(Path(folder, "run"))} | CONDITIONS[condition]
        run = retrain.train({table: dict(values) for table, values in BASE.items()}, quiet=True, **settings)
        rows = [json.loads(line) for line in Path(run.folder, "metrics.jsonl").read_text().splitlines()]
    rates = [row["eval_correct_rate"] for row in rows if "eval_correct_rate" in row]
    return [round(rate * BASE["eval"]["examples"] * BASE["eval"]["samples"]) for rate in rates]


def about() -> dict[str, Any]:
    """What the curves are of, and when and with what they were made."""
    return {
        "made_by": "benchmarks/forecast_curves.py",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("retrain-core", "torch")},
        "steps": [0, *range(EVERY, STEPS + 1, EVERY)],
        "completions": BASE["eval"]["examples"] * BASE["eval"]["samples"],
    }


def text_of(stored: dict[str, Any]) -> str:
    """JSON with a line per run."""
    runs = ",\n  ".join(json.dumps(run) for run in stored["runs"])
    return f'{{"about": {json.dumps(stored["about"])},\n "runs": [\n  {runs}\n]}}\n'


if __name__ == "__main__":
    main()
