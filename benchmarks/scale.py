"""How a step's time and memory grow: `python benchmarks/scale.py [--only length]`.

Whole steps of `retrain`, a process per size, from 2,000 to 260,000 completion tokens: more prompts, more completions
per prompt, longer completions; and at 8,192 tokens higher ranks, more layers and larger vocabularies (the last two of
the shape `small`). The model's completions never end by themselves. Each series gets an exponent of time against tokens
(against what grows, in the last three), with its 95 % interval; and one against the operations that the step needs,
which grow faster than tokens do where attention has longer rows to look at.

Memory is what the process (on CUDA: the device) had at its peak beyond a run of 64 tokens.

`--only steps` is one run of 10,000 short steps in place of that: the median step of each hundred next to the first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import report
from harness.figures import Growth, growth
from harness.limits import Shape, Work, decode, prefill, training
from harness.machine import machine
from harness.models import SHAPES, endless_model
from harness.processes import Run
from harness.rounds import Contender, run_one, run_rounds
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
    layers: int = 0  # 0: the model's own
    vocabulary: int = 0

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
    "length": [Size(new=new) for new in (16, 64, 256, 1024, 2048)],
    "rank": [Size(rank=rank) for rank in (4, 8, 16, 32, 64, 128)],
    "layers": [Size(layers=layers) for layers in (2, 4, 8, 16, 32)],
    "vocabulary": [Size(vocabulary=4096 * times) for times in (1, 2, 4, 8, 16, 32)],
}
OTHER_MODELS = ("layers", "vocabulary")  # series whose sizes differ in the model
OWN_AXIS = ("rank", *OTHER_MODELS)  # whose sizes have the same tokens
QUICK = {
    "batch": [Size(batch=batch, group=4, new=8) for batch in (1, 4)],
    "rank": [Size(batch=1, group=4, new=8, rank=rank) for rank in (4, 8)],
    "layers": [Size(batch=1, group=4, new=8, layers=layers) for layers in (2, 4)],
}
STEPS, BLOCK = 10_000, 100
SHORT = Size(batch=1, group=4, new=8)


def main() -> None:
    """Measure, print, write."""
    options = _options()
    where = machine(options.device)
    series = QUICK if options.quick else SERIES
    series = {name: sizes for name, sizes in series.items() if options.only in ("", name)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.folder or scratch).resolve()
        write_tasks(folder, questions(4096))
        if options.only == "steps":
            _publish_steps(options, folder, where)
            return
        sizes = {SMALLEST, *(size for sizes in series.values() for size in sizes)}
        by_name = {_name(size): size for size in sorted(sizes, key=lambda size: (size.tokens, size.rank, size.batch))}
        models = {size: _model(size, options, folder) for size in by_name.values()}
        contenders = [_contender(size, options, folder, models[size]) for size in by_name.values()]
        done = run_rounds(contenders, options.rounds, folder / "runs", options.device)
        operations = {size: size.operations(Shape.read(model)) for size, model in models.items()}
    if done.failures:
        sys.exit(f"no exponent without all sizes: {done.failures}")
    points = {by_name[name]: _point(mine) for name, mine in done.runs.items()}
    grown = {name: _grown(name, sizes, points, operations) for name, sizes in series.items()}
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
            f"Medians of {options.steps * options.rounds} steps of each size; exponents with 95 % intervals,",
            f"against tokens or {', '.join(OWN_AXIS)}. Memory: beyond a run of 64 tokens of the built-in model, at",
            "the smallest and the largest size.",
        ),
        figures={
            "settings": report.settings(options),
            "points": [{"size": size, "operations": operations[size], **each} for size, each in points.items()],
            "series": grown,
        },
        machine=where,
    ).publish(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny", help="random weights unless it is tiny")
    parser.add_argument("--only", choices=("", *SERIES, "steps"), default="", help="one series alone")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each size in a round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", default="", help="keep everything here")
    parser.add_argument("--quick", action="store_true", help="a small run that shows that everything works")
    report.add_output_options(parser)
    options = parser.parse_args()
    options.steps = 1 if options.quick else options.steps
    return options


def _name(size: Size) -> str:
    own = [f"{name} {value}" for name in OTHER_MODELS if (value := getattr(size, name))]
    return ", ".join([f"{size.batch} x {size.group} x {size.new}, rank {size.rank}", *own])


def _model(size: Size, options: argparse.Namespace, folder: Path) -> Path:
    """The model of this size; all but two series share one."""
    place = folder / f"model-{size.layers}-{size.vocabulary}"
    if place.exists():
        return place
    shape = "small" if size.layers or size.vocabulary else options.shape
    return endless_model(place, shape=shape, layers=size.layers, vocabulary=size.vocabulary, device=options.device)


def _contender(size: Size, options: argparse.Namespace, folder: Path, model: Path, steps: int = 0) -> Contender:
    steps = steps or WARM_UP + options.steps
    tables = {
        "model": {"model": str(model), "lora_rank": size.rank},
        "training": {
            "batch_size": size.batch,
            "group_size": size.group,
            "max_tokens": size.new,
            "max_steps": steps,
        },
    }
    file = folder / f"{_name(size)}.toml"
    command = write_config(file, folder, options.device, tables)
    return Contender(name=_name(size), command=command, lines=LINES, count=steps)


def _point(runs: Sequence[Run]) -> dict[str, Any]:
    counted = [record for run in runs for record in run.records[WARM_UP:]]
    return {
        "step_s": statistics.median(period for run in runs for period in run.periods_s(WARM_UP)),
        "used_s": statistics.median(run.used_per_period_s(WARM_UP) for run in runs),
        "sample_s": statistics.median(record["sample_time_s"] for record in counted),
        "train_s": statistics.median(record["train_time_s"] for record in counted),
        "bytes": max(run.device_bytes or run.peak_bytes for run in runs),
    }


def _grown(
    name: str, sizes: Sequence[Size], points: dict[Size, dict[str, Any]], operations: dict[Size, float]
) -> dict[str, Growth]:
    """Exponents of one series."""
    xs = [float(getattr(size, name) if name in OWN_AXIS else size.tokens) for size in sizes]
    found = {key: growth(xs, [points[size][key] for size in sizes]) for key in TIMES if points[sizes[0]][key]}
    if name != "rank":  # which hardly changes the operations
        found["operations"] = growth([operations[size] for size in sizes], [points[size]["step_s"] for size in sizes])
    return found


def _publish_steps(options: argparse.Namespace, folder: Path, where: dict[str, Any]) -> None:
    """One long run, in blocks of steps, without the first step: it comes after the start."""
    count = 3 * BLOCK if options.quick else STEPS
    contender = _contender(SHORT, options, folder, _model(SHORT, options, folder), steps=count + 1)
    run = run_one(contender, folder / "long", options.device)
    wall_s, used_s = run.periods_s(), [after - before for before, after in pairwise(run.used_s)]
    rows = []
    for name, periods_s in (("wall", wall_s), ("processor", used_s)):
        # Processor time is counted in hundredths of a second, so a mean in place of the median.
        of_block = statistics.median if name == "wall" else statistics.fmean
        blocks = [of_block(periods_s[at : at + BLOCK]) for at in range(0, count, BLOCK)]
        figures = blocks[0], statistics.median(blocks), max(blocks[1:]), blocks[-1]
        rows.append([name, *(f"{each * 1000:.2f} ms" for each in figures), f"{figures[1] / blocks[0]:.3f}"])
    report.Report(
        name="steps",
        columns=("time", f"first {BLOCK} steps", "median block", "slowest block", "last block", "median / first"),
        rows=rows,
        notes=(
            f"{count:,} steps of {_name(SHORT)} tokens in blocks of {BLOCK}: medians of wall time, means of processor",
            f"time. Peak memory {report.mebibytes(run.peak_bytes)}.",
        ),
        figures={"settings": report.settings(options), "wall_s": wall_s, "used_s": used_s},
        machine=where,
    ).publish(options)


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
