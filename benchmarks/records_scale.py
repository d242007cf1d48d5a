"""Seconds and memory of commands that look at many runs: `python benchmarks/records_scale.py [--runs N] [--steps N]`.

A synthetic campaign (1,000 runs x 500 steps by default, 1.1 GB in the formats of real runs) is written, and each
command is run on it in a process of its own, with the files in the page cache. Exit code 1 beyond 20 s or 1 GB.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

MADE_RUNS = Path(__file__).parents[1] / "tests/kit/made_runs.py"
TARGET_S, TARGET_BYTES = 20.0, 10**9
SEEDS = 8
COMMANDS = {
    "status": ["status", "{root}", "--all", "--json"],
    "compare": ["compare", "{campaign}", "--json"],
    "compare, tokens": ["compare", "{campaign}", "--json", "--align", "tokens"],
}


def main() -> None:
    """Print a line per command; exit code 1 when one misses a target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--folder", default="", help="Where the campaign is kept; one that is there is used.")
    parser.add_argument("--only", choices=list(COMMANDS), help="One command alone.")
    parser.add_argument("--json", action="store_true", help="As JSON.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(options.folder or temporary)
        campaign = root / "campaign_20260301_120000"
        if not campaign.exists():
            _apart(_write, campaign, options.runs, options.steps)
        names = [options.only] if options.only else list(COMMANDS)
        results = {
            name: _measure([part.format(root=root, campaign=campaign) for part in COMMANDS[name]]) for name in names
        }
        size = sum(file.stat().st_size for file in campaign.rglob("*") if file.is_file())
    if options.json:
        print(json.dumps({"campaign_bytes": size, "commands": results}, indent=2))
    else:
        print(f"campaign: {options.runs} runs x {options.steps} steps, {size / 1e9:.2f} GB")
        for name, result in results.items():
            print(f"{name:<16} {result['seconds']:7.1f} s {result['peak_bytes'] / 1e6:8.0f} MB")
    missed = [r for r in results.values() if r["seconds"] > TARGET_S or r["peak_bytes"] > TARGET_BYTES]
    sys.exit(bool(missed))


def _apart(function: Callable[..., None], *arguments: Any) -> None:
    """Call it in a process of its own: the peak of a command is at least the memory of the process that started it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(function, *arguments).result()


def _write(campaign: Path, runs: int, steps: int) -> None:
    conditions = max(1, runs // SEEDS)
    effects = {"grpo+none": 0.0} | {f"maxrl+none~lr={i}e-05": 0.0005 * i for i in range(1, conditions)}
    _made_runs().write_campaign(campaign, effects, seeds=range(SEEDS), steps=steps)


def _made_runs() -> Any:
    spec = importlib.util.spec_from_file_location("made_runs", MADE_RUNS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["made_runs"] = module
    spec.loader.exec_module(module)
    return module


def _measure(arguments: list[str], checkout: Path | None = None) -> dict[str, float]:
    """Wall and processor seconds and peak memory of `retrain ARGUMENTS`, of this checkout or of another one."""
    script = "import sys; from retrain.cli.command_line import main; main(sys.argv[1:])"
    environment = dict(os.environ)
    if checkout:
        environment["PYTHONPATH"] = os.pathsep.join(str(path.resolve()) for path in checkout.glob("retrain-*/src"))
    started = time.perf_counter()
    command = [sys.executable, "-c", script, *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, ["retrain", *arguments])
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "seconds": time.perf_counter() - started,
        "processor_s": usage.ru_utime + usage.ru_stime,
        "peak_bytes": float(usage.ru_maxrss * unit),
    }


if __name__ == "__main__":
    main()
