"""Cost of a checkpoint after every step, as a share of the step: `python benchmarks/checkpoint.py [--steps N]`.

Both runs, with and without checkpoints, are those of the tiny template (or of another file), one after the other in one
process. The share is the time in checkpoints over the time in the same run's steps; the parts of a checkpoint are timed
on their own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from retrain.cli.command_line import run as retrain
from retrain.records import checkpoints, files
from retrain.run.run_records import RunRecords

TARGET = 0.10


class Stopwatch:
    """Seconds of every call of the functions that it is wrapped around, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time taken."""

        def call(*args: Any, **more: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **more)
            finally:
                self.seconds.setdefault(name, []).append(time.perf_counter() - started)

        return call


def main() -> None:
    """Print the share and where the time goes; exit code 1 beyond the target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", default="", help="Where the runs write; the disk is part of what is measured.")
    parser.add_argument("overrides", nargs="*", help="Flags of retrain, after --")
    options = parser.parse_args()
    watch = Stopwatch()
    with tempfile.TemporaryDirectory(dir=options.folder or None) as folder, _timed(watch):
        os.chdir(folder)
        _quiet("init", "--template", "tiny")
        base = ["--max-steps", str(options.steps), "--eval-examples", "0", *options.overrides]
        walls = {}
        for every in (0, 1):
            started = time.perf_counter()
            _quiet(*base, "--save-every", str(every), "--log-dir", f"every-{every}")
            walls[every] = time.perf_counter() - started
        steps_s = [json.loads(line)["step_time_s"] for line in Path("every-1/metrics.jsonl").read_text().splitlines()]
    saves_s = watch.seconds["save_run"][1 : options.steps]  # the first is that of the run without, the last is final
    share = sum(saves_s) / sum(steps_s[: len(saves_s)])
    print(f"step        median {1e3 * statistics.median(steps_s):7.1f} ms")
    print(f"checkpoint  median {1e3 * statistics.median(saves_s):7.1f} ms")
    for name, seconds in watch.seconds.items():
        if name != "save_run":
            print(f"  {name:<18} {1e3 * sum(seconds) / len(watch.seconds['save_run']):7.1f} ms per checkpoint")
    print(f"share of the step time: {share:.1%} (target {TARGET:.0%}); wall {walls[0]:.1f} s without, {walls[1]:.1f} s")
    sys.exit(share > TARGET)


@contextmanager
def _timed(watch: Stopwatch) -> Any:
    RunRecords.save = watch.timed("save_run", RunRecords.save)  # type: ignore[method-assign]
    checkpoints.write_folder = watch.timed("write_folder", files.write_folder)  # type: ignore[attr-defined]
    checkpoints._fill = watch.timed("backend.save", checkpoints._fill)
    checkpoints.digest_of = watch.timed("checksums", checkpoints.digest_of)  # type: ignore[attr-defined]
    files.os.fsync = watch.timed("fsync", os.fsync)
    yield


def _quiet(*arguments: str) -> None:
    out = sys.stdout
    with open(os.devnull, "w") as sink:
        sys.stdout = sink
        try:
            code = retrain(list(arguments))
        finally:
            sys.stdout = out
    if code:
        raise subprocess.CalledProcessError(code, ["retrain", *arguments])


if __name__ == "__main__":
    main()
