"""From the command to the end of the first step: `python benchmarks/startup.py [--rounds 5]`.

Ours beside TRL's, both with `builtin:tiny` and 128 completions, or with the model of `--model DIR` and the step that
`--batch`, `--group` and `--new` make: the time from starting the process until the line of its first step is in its
records. And `retrain --help`, beside a Python that does nothing. One round of each does not
count: it writes byte code and fills the cache of files.
"""

from __future__ import annotations

import argparse
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
from harness.models import add_model_options, model_name, natural_model, our_model, table_name
from harness.rounds import Contender, add_only, chosen, run_rounds
from harness.runs import LINES, questions, write_config, write_tasks
from peers.environment import peer_python
from step import peer

OURS, THEIRS = "retrain", "TRL"
SHORT = {"retrain --help": ["-m", "retrain", "--help"], "python -c pass": ["-c", "pass"]}


def main() -> None:
    """Measure, print, write."""
    options = _options()
    where = machine(options.device, options.peer_python)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        contenders = _contenders(options, folder)
        done = run_rounds(contenders, options.rounds + 1, folder / "runs", options.device)
        short = {name: _short(arguments, options.rounds + 1, folder)[1:] for name, arguments in SHORT.items()}
    found: dict[str, dict[str, Any]] = {}
    for name, mine in done.runs.items():
        first_s = [run.seen_s[0] for run in mine[1:]]
        found[name] = {
            "first_step_s": Spread.of(first_s),
            "rounds_s": [[seconds] for seconds in first_s],
            "step_s": Spread.of([run.records[0]["step_time_s"] for run in mine[1:]]),
            "whole_s": Spread.of([run.wall_s for run in mine[1:]]),
            "used_s": Spread.of([run.used_s[0] for run in mine[1:]]),
            "cpu_s": Spread.of([run.cpu_s for run in mine[1:]]),
        }
        ours = found[OURS]["rounds_s"] if OURS in found else None
        found[name]["ratio"] = ratios(ours, found[name]["rounds_s"])
    commands = {name: Spread.of(seconds) for name, seconds in short.items()}
    rows = [
        [
            name,
            report.seconds(each["first_step_s"]),
            report.times(each["ratio"]) if name == THEIRS else "1",
            report.seconds(each["used_s"]),
            report.seconds(each["step_s"]),
            report.seconds(each["whole_s"]),
        ]
        for name, each in found.items()
    ]
    report.Report(
        name=table_name("startup", options),
        columns=(
            "",
            "start to the end of the first step",
            "x ours",
            "processor",
            "of it the step itself",
            "to the process's end",
        ),
        rows=[*rows, *([f"`{name}`", "-", "-", "-", "-", report.seconds(spread)] for name, spread in commands.items())],
        notes=(
            f"{model_name(options)}, {options.batch} x {options.group} completions of at most {options.new} tokens.",
            f"Medians of {options.rounds} starts in alternating order, with quartiles. Processor: time of all threads",
            "of the run's processes until then.",
        ),
        figures={"settings": report.settings(options), "contenders": found, "commands": commands},
        machine=where,
        failures=done.failures,
    ).publish(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--batch", type=int, default=8, help="prompts of the step")
    parser.add_argument("--group", type=int, default=16, help="completions per prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens per completion, at most")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--peer-rows", type=int, default=0, help="completions per pass of TRL; 0 = all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-python", default="", help="an interpreter that has TRL; else an environment is made")
    add_only(parser, (OURS, THEIRS))
    parser.add_argument("--alone", action="store_true", help="ours only")
    parser.add_argument("--quick", action="store_true", help="a small run that shows that everything works")
    report.add_output_options(parser)
    options = parser.parse_args()
    options.rounds = 1 if options.quick else options.rounds
    options.peer_rows = options.peer_rows or options.batch * options.group
    options.names = [OURS] if options.alone else chosen(options.only, (OURS, THEIRS))
    options.peer_python = sys.executable if THEIRS not in options.names else peer_python("trl", options.peer_python)
    return options


def _contenders(options: argparse.Namespace, folder: Path) -> list[Contender]:
    write_tasks(folder, questions(64))
    sizes = {
        "batch_size": options.batch,
        "group_size": options.group,
        "max_tokens": options.new,
        "max_steps": 1,
    }
    model = our_model(options, natural_model(options)) | ({} if options.model else {"model": "builtin:tiny"})
    tables: dict[str, dict[str, Any]] = {"training": sizes, "model": model}
    ours = write_config(folder / "retrain.toml", folder, options.device, tables)
    found = [
        Contender(name=OURS, command=ours, lines=LINES, count=1, environ=_byte_code(folder)),
        peer(THEIRS, options, folder, str(natural_model(options)), 1, environ=_byte_code(folder)),
    ]
    return [each for each in found if each.name in options.names]


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
