"""From the command to the end of the first step: `python benchmarks/startup.py [--rounds 5]`.

Ours beside TRL's, both with `builtin:tiny` and 128 completions: the time from starting the process until the line of
its first step is in its records. And `retrain --help`, beside a Python that does nothing. One round of each does not
count: it writes byte code and fills the cache of files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import report
from harness.figures import Spread, ratios
from harness.machine import machine
from harness.models import builtin_folder
from harness.rounds import Contender, run_rounds
from harness.runs import LINES, questions, write_config, write_tasks
from peers.environment import peer_python

PEER = Path(__file__).parent / "workers/trl_grpo.py"
OURS, THEIRS = "retrain", "TRL"
SHORT = {"retrain --help": ["-m", "retrain", "--help"], "python -c pass": ["-c", "pass"]}


def main() -> None:
    """Measure, print, write."""
    options = _options()
    where = machine(options.device, options.peer_python)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        contenders = _contenders(options, folder)
        runs = run_rounds(contenders, options.rounds + 1, folder / "runs", options.device)
        short = {name: _short(arguments, options.rounds + 1, folder)[1:] for name, arguments in SHORT.items()}
    found: dict[str, dict[str, Any]] = {}
    for name, mine in runs.items():
        first_s = [run.seen_s[0] for run in mine[1:]]
        found[name] = {
            "first_step_s": Spread.of(first_s),
            "rounds_s": [[seconds] for seconds in first_s],
            "step_s": Spread.of([run.records[0]["step_time_s"] for run in mine[1:]]),
            "whole_s": Spread.of([run.wall_s for run in mine[1:]]),
            "cpu_s": Spread.of([run.cpu_s for run in mine[1:]]),
        }
        found[name]["ratio"] = ratios(found[OURS]["rounds_s"], found[name]["rounds_s"])
    commands = {name: Spread.of(seconds) for name, seconds in short.items()}
    rows = [
        [
            name,
            report.seconds(each["first_step_s"]),
            report.times(each["ratio"]) if name == THEIRS else "1",
            report.seconds(each["step_s"]),
            report.seconds(each["whole_s"]),
        ]
        for name, each in found.items()
    ]
    report.Report(
        name="startup",
        columns=("", "start to the end of the first step", "x ours", "of it the step itself", "to the process's end"),
        rows=[*rows, *([f"`{name}`", "-", "-", "-", report.seconds(spread)] for name, spread in commands.items())],
        notes=(f"Medians of {options.rounds} starts in alternating order, with quartiles.",),
        figures={"settings": report.settings(options), "contenders": found, "commands": commands},
        machine=where,
    ).publish(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-python", default="", help="an interpreter that has TRL; else an environment is made")
    parser.add_argument("--alone", action="store_true", help="ours only")
    parser.add_argument("--quick", action="store_true", help="a small run that shows that everything works")
    report.add_output_options(parser)
    options = parser.parse_args()
    options.rounds = 1 if options.quick else options.rounds
    options.peer_python = sys.executable if options.alone else peer_python("trl", options.peer_python)
    return options


def _contenders(options: argparse.Namespace, folder: Path) -> list[Contender]:
    write_tasks(folder, questions(64))
    model = str(builtin_folder())
    sizes = {"batch_size": 8, "group_size": 16, "max_tokens": 64, "max_steps": 1}
    tables: dict[str, dict[str, Any]] = {"training": sizes, "model": {"model": "builtin:tiny", "lora_rank": 16}}
    settings = {
        "device": options.device,
        "tasks": str(folder),
        "model": model,
        "rank": 16,
        "batch": 8,
        "group": 16,
        "new": 64,
        "steps": 1,
        "rows_per_pass": 128,
        "gradient_checkpointing": False,
    }
    (folder / "trl.json").write_text(json.dumps(settings), encoding="utf-8")
    ours = write_config(folder / "retrain.toml", folder, options.device, tables)
    theirs = [options.peer_python, str(PEER), str(folder / "trl.json")]
    found = [
        Contender(name=OURS, command=ours, lines=LINES, environ=_byte_code(folder)),
        Contender(name=THEIRS, command=theirs, lines="steps.jsonl", environ=_byte_code(folder)),
    ]
    return found[:1] if options.alone else found


def _byte_code(folder: Path) -> dict[str, str]:
    """Byte code is kept, as it is for a user, whatever this process was told about it."""
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "byte code")}


def _short(arguments: list[str], count: int, folder: Path) -> list[float]:
    found, environ = [], {**os.environ, **_byte_code(folder)}
    for _ in range(count):
        started = time.perf_counter()
        subprocess.run([sys.executable, *arguments], env=environ, stdout=subprocess.DEVNULL, check=True)
        found.append(time.perf_counter() - started)
    return found


if __name__ == "__main__":
    main()
