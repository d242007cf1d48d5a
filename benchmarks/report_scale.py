"""Seconds, memory and size of `retrain report` at scale: `python benchmarks/report_scale.py [--runs N] [--steps N]`.

Two made-up records in the formats of real ones: a campaign (1,000 runs x 500 steps by default), and a long run (10
million completions, 21 GB of `generations.jsonl`) and one of a hundredth of it. `status`, `compare` and `report` are
run on both, each in a process of its own, after the files were written. Exit code 1 beyond 20 s (10 s on the long
run), 1 GB of memory or a page of 10 MB.

`--before CHECKOUT` runs each command of another checkout of this repository too, in turn with this one, and prints the
ratio of the medians of `--rounds`: on a busy machine a figure alone says little, a ratio of processor seconds holds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
MADE_RUNS = HERE.parent / "tests/kit/made_runs.py"
TARGET_S, TARGET_LONG_S, TARGET_BYTES, TARGET_PAGE_BYTES = 20.0, 10.0, 10**9, 10 * 10**6
PER_STEP, CHARS = 128, 1700  # completions and their length in the long run: 2 kB a line


def main() -> None:
    """Print a line per command; exit code 1 when one misses a target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--completions", type=int, default=10_000_000, help="Of the long run; 0 leaves it out.")
    parser.add_argument("--folder", default="", help="Where the records are kept; what is there is used.")
    parser.add_argument("--before", type=Path, help="Another checkout to compare with.")
    parser.add_argument("--rounds", type=int, default=1, help="Runs of each command; medians are shown.")
    parser.add_argument("--json", action="store_true", help="As JSON.")
    options = parser.parse_args()
    scale = _module(HERE / "records_scale.py")
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(options.folder or temporary)
        campaign, long_run = root / "campaigns" / "campaign_20260301_120000", root / "long" / "run"
        if not campaign.exists():
            scale._apart(scale._write, campaign, options.runs, options.steps)
        other = long_run.with_name("other")
        for folder, completions in ((long_run, options.completions), (other, options.completions // 100)):
            if completions and not folder.exists():
                scale._apart(_write_long, folder, completions)
        page = root / "page.html"
        commands = {
            "status, campaign": ["status", str(campaign.parent), "--all", "--json"],
            "compare, campaign": ["compare", str(campaign), "--json"],
            "report, campaign": ["report", str(campaign), "-o", str(page)],
        }
        if options.completions:
            commands |= {
                "status, long run": ["status", str(long_run.parent), "--all", "--json"],
                "compare, long run": ["compare", str(long_run), str(other), "--json"],
                "report, long run": ["report", str(long_run), "-o", str(page)],
            }
        results: dict[str, dict[str, float]] = {}
        for name, arguments in commands.items():
            checkouts = {name: None} | ({f"{name}, before": options.before} if options.before else {})
            rounds: dict[str, list[dict[str, float]]] = {each: [] for each in checkouts}
            for _ in range(options.rounds):
                for each, checkout in checkouts.items():
                    measured = scale._measure(arguments, checkout)
                    if arguments[0] == "report":
                        measured["page_bytes"] = page.stat().st_size
                    rounds[each].append(measured)
            results |= {each: _medians(found) for each, found in rounds.items()}
    print(json.dumps(results, indent=2) if options.json else _table(results))
    sys.exit(any(_is_missed(name, result) for name, result in results.items()))


def _write_long(folder: Path, completions: int) -> None:
    """A run whose completions are those of one step, again and again."""
    steps = completions // PER_STEP
    made = _module(MADE_RUNS)
    made.write_run(folder, made.MadeRun(steps=steps, eval_every=max(1, steps // 20)))
    step = made.MadeRun(steps=1, completions=PER_STEP, texts=["x" * CHARS])
    lines = made._generations(step, {"rate": [0.5]}, made.np.random.default_rng(0))
    head = '{"step": 0,'
    rest = [line.removeprefix(head).encode() for line in lines]
    with (folder / "emergence" / "generations.jsonl").open("wb") as stream:
        for number in range(steps):
            start = f'{{"step": {number},'.encode()
            stream.write(b"".join(start + line for line in rest))


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def _table(results: dict[str, dict[str, float]]) -> str:
    lines = []
    for name, result in results.items():
        page = f"{result['page_bytes'] / 1e6:7.1f} MB page" if "page_bytes" in result else ""
        spent = f"{result['seconds']:7.1f} s{result['processor_s']:7.1f} processor s"
        lines.append(f"{name:<26}{spent}{result['peak_bytes'] / 1e6:8.0f} MB memory{page}")
        if before := results.get(f"{name}, before"):
            ratios = ", ".join(f"{unit} {value / before[unit]:.2f}" for unit, value in result.items())
            lines.append(f"{'  now / before':<26}{ratios}")
    return "\n".join(lines)


def _is_missed(name: str, result: dict[str, float]) -> bool:
    is_large = result.get("page_bytes", 0) > TARGET_PAGE_BYTES
    most_s = TARGET_LONG_S if "long run" in name else TARGET_S
    return is_large or result["seconds"] > most_s or result["peak_bytes"] > TARGET_BYTES


def _module(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
