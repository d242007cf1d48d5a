"""Seconds, memory and size of `retrain report` at scale: `python benchmarks/report_scale.py [--runs N] [--steps N]`.

Two made-up records in the formats of real ones: a campaign (1,000 runs x 500 steps by default), on which `status` and
`report` are run, and one long run (2 million completions, 4 GB of `generations.jsonl`). Each command runs in a process
of its own, with the files in the page cache. Exit code 1 beyond 20 s, 1 GB of memory or a page of 10 MB.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
MADE_RUNS = HERE.parent / "tests/made_runs.py"
TARGET_S, TARGET_BYTES, TARGET_PAGE_BYTES = 20.0, 10**9, 10 * 10**6
PER_STEP, CHARS = 128, 1700  # completions and their length in the long run: 2 kB a line


def main() -> None:
    """Print a line per command; exit code 1 when one misses a target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--completions", type=int, default=2_000_000, help="Of the long run; 0 leaves it out.")
    parser.add_argument("--folder", default="", help="Where the records are kept; what is there is used.")
    parser.add_argument("--json", action="store_true", help="As JSON.")
    options = parser.parse_args()
    scale = _module(HERE / "records_scale.py")
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(options.folder or temporary)
        campaign, long_run = root / "campaigns" / "campaign_20260301_120000", root / "long" / "run"
        if not campaign.exists():
            scale._write(campaign, options.runs, options.steps)
        if options.completions and not long_run.exists():
            _write_long(long_run, options.completions)
        page = root / "page.html"
        commands = {
            "status, campaign": ["status", str(campaign.parent), "--all", "--json"],
            "report, campaign": ["report", str(campaign), "-o", str(page)],
        }
        if options.completions:
            commands |= {
                "status, long run": ["status", str(long_run.parent), "--all", "--json"],
                "report, long run": ["report", str(long_run), "-o", str(page)],
            }
        results: dict[str, dict[str, float]] = {}
        for name, arguments in commands.items():
            results[name] = scale._measure(arguments)
            if arguments[0] == "report":
                results[name]["page_bytes"] = page.stat().st_size
    print(json.dumps(results, indent=2) if options.json else _table(results))
    sys.exit(any(_is_missed(result) for result in results.values()))


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


def _table(results: dict[str, dict[str, float]]) -> str:
    lines = []
    for name, result in results.items():
        page = f"{result['page_bytes'] / 1e6:7.1f} MB page" if "page_bytes" in result else ""
        lines.append(f"{name:<18}{result['seconds']:7.1f} s{result['peak_bytes'] / 1e6:8.0f} MB memory{page}")
    return "\n".join(lines)


def _is_missed(result: dict[str, float]) -> bool:
    is_large = result.get("page_bytes", 0) > TARGET_PAGE_BYTES
    return is_large or result["seconds"] > TARGET_S or result["peak_bytes"] > TARGET_BYTES


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
