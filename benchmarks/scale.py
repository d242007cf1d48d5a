"""How a step's time and memory grow: `python benchmarks/scale.py [--only length]`.

Whole steps of `retrain`, a process per size, from 2,000 to 200,000 completion tokens: more prompts, more completions
per prompt, longer completions; and higher ranks at 8,192 tokens. The model's completions never end by themselves. Each
series gets an exponent of time against tokens (against the rank, in the last), with its 95 % interval; and one against
the operations that the step needs, which grow faster than tokens do where attention has longer rows to look at.

Memory is what the process (on CUDA: the device) had at its peak beyond a run of 64 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import report
from harness.figures import Growth, growth
from harness.limits import Shape, Work, decode, prefill, training
from harness.machine import machine
from harness.models import SHAPES, endless_model
from harness.processes import Run
from harness.rounds import Contender, run_rounds
from harness.runs import LINES, PLAIN_PROMPT, questions, write_config, write_tasks

TIMES = ("step_s", "used_s", "sample_s", "train_s")
WARM_UP = 1  # steps at the start of each process that do not count


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One step: prompts, completions of each, tokens of each, rank."""

    batch: int = 8
    group: int = 16
    new: int = 64
    rank: int = 16

    @property
    def tokens(self) -> int:
        """Completion tokens."""
        return self.batch * self.group * self.new

    def operations(self, shape: Shape) -> float:
        """Of sampling and training."""
        work = Work(rows=self.batch * self.group, group=self.group, prompt=PLAIN_PROMPT, new=self.new)
        rows = [(PLAIN_PROMPT, self.new)] * work.rows
        drawn = decode(shape, work, 4).operations + prefill(shape, work, 4).operations
        return drawn + training(shape, rows, self.rank, 4, groups=self.batch).operations


SMALLEST = Size(batch=1, group=4, new=16)
SERIES = {
    "batch": [Size(batch=batch) for batch in (2, 6, 20, 64, 196)],
    "group": [Size(group=group) for group in (4, 12, 40, 128, 392)],
    "length": [Size(new=new) for new in (16, 48, 160, 512, 1568)],
    "rank": [Size(rank=rank) for rank in (4, 8, 16, 32, 64, 128)],
}
QUICK = {
    "batch": [Size(batch=batch, group=4, new=8) for batch in (1, 4)],
    "rank": [Size(batch=1, group=4, new=8, rank=rank) for rank in (4, 8)],
}


def main() -> None:
    """Measure, print, write."""
    options = _options()
    where = machine(options.device)
    series = QUICK if options.quick else SERIES
    series = {name: sizes for name, sizes in series.items() if options.only in ("", name)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.folder or scratch).resolve()
        model = endless_model(folder / "model", shape=options.shape, device=options.device)
        shape = Shape.read(model)
        write_tasks(folder, questions(4096))
        sizes = {SMALLEST, *(size for sizes in series.values() for size in sizes)}
        by_name = {_name(size): size for size in sorted(sizes, key=lambda size: (size.tokens, size.rank, size.batch))}
        contenders = [_contender(size, options, folder, model) for size in by_name.values()]
        done = run_rounds(contenders, options.rounds, folder / "runs", options.device)
    if done.failures:
        sys.exit(f"no exponent without all sizes: {done.failures}")
    points = {by_name[name]: _point(mine) for name, mine in done.runs.items()}
    grown = {name: _grown(name, sizes, points, shape) for name, sizes in series.items()}
    report.Report(
        name="scale",
        columns=(
            "grown",
            "tokens",
            "step",
            "exponent",
            "of processor time",
            "sampling",
            "training",
            "against operations",
            "memory",
        ),
        rows=[_row(name, series[name], points, found) for name, found in grown.items()],
        notes=(
            f"Medians of {options.steps * options.rounds} steps of each size; exponents with 95 % intervals, that of",
            "`rank` against the rank. Memory: beyond a run of 64 tokens, at the smallest and the largest size.",
        ),
        figures={
            "settings": report.settings(options),
            "points": [{"size": size, "operations": size.operations(shape), **each} for size, each in points.items()],
            "series": grown,
        },
        machine=where,
    ).publish(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny", help="random weights unless it is tiny")
    parser.add_argument("--only", choices=("", *SERIES), default="", help="one series alone")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each size in a round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", default="", help="keep everything here")
    parser.add_argument("--quick", action="store_true", help="a small run that shows that everything works")
    report.add_output_options(parser)
    options = parser.parse_args()
    options.steps = 1 if options.quick else options.steps
    return options


def _name(size: Size) -> str:
    return f"{size.batch} x {size.group} x {size.new}, rank {size.rank}"


def _contender(size: Size, options: argparse.Namespace, folder: Path, model: Path) -> Contender:
    tables = {
        "model": {"model": str(model), "lora_rank": size.rank},
        "training": {
            "batch_size": size.batch,
            "group_size": size.group,
            "max_tokens": size.new,
            "max_steps": WARM_UP + options.steps,
        },
    }
    file = folder / f"{_name(size)}.toml"
    command = write_config(file, folder, options.device, tables)
    return Contender(name=_name(size), command=command, lines=LINES, count=WARM_UP + options.steps)


def _point(runs: Sequence[Run]) -> dict[str, Any]:
    counted = [record for run in runs for record in run.records[WARM_UP:]]
    return {
        "step_s": statistics.median(period for run in runs for period in run.periods_s(WARM_UP)),
        "used_s": statistics.median(run.used_per_period_s(WARM_UP) for run in runs),
        "sample_s": statistics.median(record["sample_time_s"] for record in counted),
        "train_s": statistics.median(record["train_time_s"] for record in counted),
        "bytes": max(run.device_bytes or run.peak_bytes for run in runs),
    }


def _grown(name: str, sizes: Sequence[Size], points: dict[Size, dict[str, Any]], shape: Shape) -> dict[str, Growth]:
    """Exponents of one series."""
    xs = [float(size.rank if name == "rank" else size.tokens) for size in sizes]
    found = {key: growth(xs, [points[size][key] for size in sizes]) for key in TIMES if points[sizes[0]][key]}
    if name != "rank":  # which hardly changes the operations
        operations = [size.operations(shape) for size in sizes]
        found["operations"] = growth(operations, [points[size]["step_s"] for size in sizes])
    return found


def _row(name: str, sizes: Sequence[Size], points: dict[Size, dict[str, Any]], grown: dict[str, Growth]) -> list[str]:
    first, last = sizes[0], sizes[-1]
    key = "new" if name == "length" else name
    base = points[SMALLEST]["bytes"]
    memory = [report.mebibytes(max(0, points[size]["bytes"] - base)) for size in (first, last)]
    return [
        f"{name}, {getattr(first, key):,} to {getattr(last, key):,}",
        f"{first.tokens:,} to {last.tokens:,}" if first.tokens != last.tokens else f"{first.tokens:,}",
        f"{points[first]['step_s']:.3g} s to {points[last]['step_s']:.3g} s",
        *(_interval(grown.get(each)) for each in (*TIMES, "operations")),
        f"{memory[0]} to {memory[1]}",
    ]


def _interval(found: Growth | None) -> str:
    if found is None:
        return "-"
    interval = f" ({found.low:.2f} to {found.high:.2f})" if found.points > 2 else ""
    return f"{found.exponent:.2f}{interval}"


if __name__ == "__main__":
    main()
