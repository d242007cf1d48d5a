"""Processor seconds of a campaign itself, by part: `python benchmarks/campaign_scale.py [--runs N] [--planned N]`.

A campaign of `--runs` runs (1,000: 125 conditions x 8 seeds) is run with a launcher whose runs end at once and leave
the files of real ones, 64 at a time; one of `--planned` runs (10,000) is read, checked and planned, its manifest is
written once, and nothing starts. Each part counts without those inside it. What the launcher writes is not counted.

`--before CHECKOUT` measures another checkout of this repository as well.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MADE_RUNS = HERE.parent / "tests/kit/made_runs.py"
SEEDS = 8
CAMPAIGN = """\
[campaign]
seeds = {seeds}
max_steps = 4
parallel = true
max_workers = 64
launcher = "campaign_scale.LAUNCHER"

{conditions}
[model]
model = "builtin:tiny"

[backend]
backend = "local"
devices = "cpu"

[data]
source = "files"
path = "tasks.jsonl"

[reward]
type = "match"

[logging]
log_dir = "out"
"""
CONDITION = '[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "none"\nlr = {lr:.6g}\n'
RUNS = "(what the runs write)"


class Spent:
    """Processor seconds and calls by part; a part inside another one is taken out of that."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inner: list[float] = []

    def count(self, owner: Any, name: str, part: str) -> None:
        """Count the calls of a function or method."""
        function: Callable[..., Any] = getattr(owner, name)

        @wraps(function)
        def counted(*arguments: Any, **named: Any) -> Any:
            before = time.process_time()
            self._inner.append(0.0)
            try:
                return function(*arguments, **named)
            finally:
                took = time.process_time() - before
                self.seconds[part] += took - self._inner.pop()
                self.calls[part] += 1
                if self._inner:
                    self._inner[-1] += took

        setattr(owner, name, counted)


class Finished:
    """A run that has ended."""

    pid = None

    def poll(self) -> int:
        """It has."""
        return 0


class Launcher:
    """Its runs end at once, and leave the files of real ones."""

    def __init__(self) -> None:
        spec = importlib.util.spec_from_file_location("made_runs", MADE_RUNS)
        assert spec is not None
        assert spec.loader is not None
        self._made: Any = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = self._made
        spec.loader.exec_module(self._made)

    def start(self, job: Any) -> Finished:
        """Write the run's folder."""
        condition, _, seed = job.name.rpartition("_s")
        self._made.write_run(job.folder, self._made.MadeRun(condition=condition, seed=int(seed), steps=4))
        (job.folder / "adapter/final").mkdir(parents=True, exist_ok=True)
        return Finished()

    def close(self) -> None:
        """Nothing is held."""


def __getattr__(name: str) -> Any:
    if name != "LAUNCHER":
        raise AttributeError(name)
    from retrain.api import PluginSpec

    return PluginSpec(name="ends-at-once", summary="Runs that end at once.", factory=lambda context: Launcher())


def main() -> None:
    """Measure each campaign in a process of its own, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--planned", type=int, default=10_000)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--measure", nargs=2, metavar=("MODE", "RUNS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure[0] == "run", int(options.measure[1]))))
        return
    wanted = [(mode, runs) for mode, runs in (("run", options.runs), ("plan", options.planned)) if runs]
    checkouts = {"": None} | ({", before": options.before} if options.before else {})
    found = {
        f"{runs:,} runs, {'run' if mode == 'run' else 'planned'}{name}": _measured(mode, runs, checkout)
        for mode, runs in wanted
        for name, checkout in checkouts.items()
    }
    print(
        json.dumps(found, indent=2) if options.json else "\n\n".join(_table(name, each) for name, each in found.items())
    )


def _measured(mode: str, runs: int, checkout: Path | None) -> dict[str, Any]:
    path = os.pathsep.join(str(each) for each in checkout.resolve().glob("retrain-*/src")) if checkout else ""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": path} if path else {})
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--measure", mode, str(runs)]
        done = subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(is_run: bool, num_runs: int) -> dict[str, Any]:
    """Read the campaign in the current folder, and run it or write what it plans."""
    from retrain.campaign import load, manifest, schedule, session
    from retrain.kernel.plugins.discover import load_plugins

    questions = (json.dumps({"prompt": f"What is {n}?", "answer": str(n)}) for n in range(1000))
    Path("tasks.jsonl").write_text("\n".join(questions))
    conditions = "\n".join(CONDITION.format(lr=1e-5 * (1 + n)) for n in range(-(-num_runs // SEEDS)))
    Path("c.toml").write_text(CAMPAIGN.format(seeds=list(range(SEEDS)), conditions=conditions))
    spent = Spent()
    for owner, name, part in (
        (load, "load_campaign", "read and check every condition"),
        (session, "open_campaign", "open the folder"),
        (session, "plan_runs", "plan"),
        (session, "identity_of", "hash code and data"),
        (session, "changed_runs", "compare runs with the code of now"),
        (session, "_manifest", "describe the campaign"),
        (manifest.Manifest, "save", "write the manifest"),
        (manifest.CampaignRecord, "_append", "write the ledger"),
        (schedule.Schedule, "_sort_in", "look at every run"),
        (schedule.Schedule, "_launch", "start runs"),
        (schedule.Schedule, "_job", "write the file of a run"),
        (schedule.Schedule, "_collect", "poll, and read how runs ended"),
        (Launcher, "start", RUNS),
        (session, "_conclude", "conclude"),
    ):
        spent.count(owner, name, part)
    plugins = load_plugins({})
    if not is_run:
        session.Schedule = _Nothing  # type: ignore[misc, assignment]
        session._conclude = lambda *arguments: None
    import campaign_scale

    spent.count(campaign_scale.Launcher, "start", RUNS)
    before = time.process_time()
    session.run_campaign(load.load_campaign(["c.toml"], plugins), plugins, is_quiet=True)
    total = time.process_time() - before - spent.seconds[RUNS]
    parts = {
        part: {"seconds": spent.seconds[part], "calls": spent.calls[part]} for part in spent.seconds if part != RUNS
    }
    rest = total - sum(each["seconds"] for each in parts.values())
    sizes = {name: Path("out", name).stat().st_size for name in ("manifest.json", "campaign.json")}
    return {
        "total_s": total,
        "parts": parts | {"the rest, follow-ups among it": {"seconds": rest, "calls": 1}},
        **sizes,
    }


class _Nothing:
    """A schedule that starts nothing."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Everything is planned by now."""
        self.attempts: Counter[str] = Counter()

    def run(self) -> None:
        """Nothing."""


def _table(name: str, found: dict[str, Any]) -> str:
    rows = sorted(found["parts"].items(), key=lambda item: -item[1]["seconds"])
    lines = [f"  {part:<40}{each['seconds']:9.2f} s{each['calls']:9,} calls" for part, each in rows]
    sizes = ", ".join(f"{each} {found[each] / 1e6:.1f} MB" for each in ("manifest.json", "campaign.json"))
    return "\n".join([f"{name}: {found['total_s']:.1f} processor s; {sizes}", *lines])


if __name__ == "__main__":
    main()
