"""A whole RL step, ours beside TRL's: `python benchmarks/step.py [--steps 20] [--json FILE] [--markdown FILE]`.

Both train `builtin:tiny` on the same tasks, 8 prompts with 16 completions each, through their own loops: `retrain`
with a configuration file, TRL 1.16's GRPOTrainer in an environment of its own. A step is the time from one line of a
run's records to the next, seen from outside. Each round starts every contender anew, in alternating order.

Fixed lengths: a copy of the model without an end of sequence, so that all draw exactly `max_tokens`. Natural lengths:
the model as it is. TRL checkpoints activations by default; the main rows do without on both sides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import report
from harness.figures import Spread, ratios
from harness.limits import Shape, Work, decode, prefill, training
from harness.machine import machine, rates
from harness.models import SHAPES, builtin_folder, endless_model
from harness.processes import Run
from harness.rounds import Contender, run_rounds
from harness.runs import LINES, PLAIN_PROMPT, questions, write_config, write_tasks
from peers.environment import peer_python

PEER = Path(__file__).parent / "workers/trl_grpo.py"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
OURS, NATURAL, PEER_NAME = "retrain", "retrain, natural lengths", "TRL"
COMPARED = {  # name -> the row of ours that it is held against
    OURS: OURS,
    "TRL": OURS,
    "TRL, 1 thread": OURS,
    "TRL, its default (activations checkpointed)": OURS,
    NATURAL: NATURAL,
    "TRL, natural lengths": NATURAL,
}


def main() -> None:
    """Measure, print, write."""
    options = _options()
    where = machine(options.device, options.peer_python)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.folder or scratch).resolve()
        contenders = _contenders(options, folder)
        runs = run_rounds(contenders, options.rounds, folder / "runs", options.device)
        drawn_s, trained_s, source = _limits(options, Shape.read(folder / "model"))
    found = {name: _figures(mine, options) for name, mine in runs.items()}
    for name, figures in found.items():
        figures["ratio"] = ratios(found[COMPARED[name]]["rounds_s"], figures["rounds_s"])
        figures["used_ratio"] = figures["used_s"] / max(found[COMPARED[name]]["used_s"], 1e-9)
        figures["memory_ratio"] = figures["peak_bytes"] / found[COMPARED[name]]["peak_bytes"]
    report.Report(
        name="step",
        columns=("", "step", "x ours", "processor", "x ours", "sampling", "training", "tokens", "memory", "x ours"),
        rows=[_row(name, figures) for name, figures in found.items()],
        notes=(
            f"Medians of {options.steps} steps with quartiles, rounds: {options.rounds}; `x ours` with the spread over",
            "rounds; tokens per completion. Processor: time of all threads of a run's processes per step, which other",
            "programs hardly change. Memory: the largest process at its peak; on CUDA, what the device gave out.",
            f"The limits at fixed lengths: sampling {drawn_s:.3g} s and training {trained_s:.3g} s; our step takes",
            f"{found[OURS]['step_s'].median / (drawn_s + trained_s):.2f} times their sum ({source}).",
        ),
        figures={
            "settings": report.settings(options),
            "contenders": found,
            "limits_s": {"sampling": drawn_s, "training": trained_s, "rates": source},
        },
        machine=where,
    ).publish(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny", help="random weights unless it is tiny")
    parser.add_argument("--batch", type=int, default=8, help="prompts per step")
    parser.add_argument("--group", type=int, default=16, help="completions per prompt")
    parser.add_argument("--prompt", type=int, default=PLAIN_PROMPT, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens per completion, at most")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each, over all rounds")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=3, help="steps at the start of each process that do not count")
    parser.add_argument(
        "--peer-rows", type=int, default=0, help="completions per pass of TRL; 0 = all on a CPU, else 4"
    )
    parser.add_argument("--peer-python", default="", help="an interpreter that has TRL; else an environment is made")
    parser.add_argument("--only", default="", help="contenders whose name holds this text, and ours")
    parser.add_argument("--folder", default="", help="keep everything here")
    parser.add_argument("--quick", action="store_true", help="a small run that shows that everything works")
    report.add_output_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.batch, options.group, options.new = 2, 4, 8
        options.steps, options.rounds, options.warm_up = 2, 1, 1
    if options.steps % options.rounds:
        parser.error("--steps must be a multiple of --rounds")
    options.contenders = _chosen(options)
    is_alone = not any(name.startswith(PEER_NAME) for name in options.contenders)
    options.peer_python = sys.executable if is_alone else peer_python(PEER_NAME.lower(), options.peer_python)
    options.peer_rows = options.peer_rows or (options.batch * options.group if options.device == "cpu" else 4)
    return options


def _chosen(options: argparse.Namespace) -> list[str]:
    """Names of those that run: random weights have no length of their own, and everyone needs ours beside it."""
    wanted = {name for name in COMPARED if options.only in name and (options.shape == "tiny" or COMPARED[name] == OURS)}
    return [name for name in COMPARED if name in wanted | {COMPARED[each] for each in wanted}]


def _contenders(options: argparse.Namespace, folder: Path) -> list[Contender]:
    endless = endless_model(folder / "model", shape=options.shape, device=options.device)
    steps = options.warm_up + options.steps // options.rounds
    write_tasks(folder, questions(options.batch * steps, options.prompt))
    natural = str(builtin_folder())
    found = [
        _ours(OURS, options, folder, str(endless), steps),
        _peer("TRL", options, folder, str(endless), steps),
        _peer("TRL, 1 thread", options, folder, str(endless), steps, environ=ONE_THREAD),
        _peer(
            "TRL, its default (activations checkpointed)", options, folder, str(endless), steps, is_checkpointing=True
        ),
        _ours(NATURAL, options, folder, natural, steps),
        _peer("TRL, natural lengths", options, folder, natural, steps),
    ]
    return [each for each in found if each.name in options.contenders]


def _ours(name: str, options: argparse.Namespace, folder: Path, model: str, steps: int) -> Contender:
    sizes = {"batch_size": options.batch, "group_size": options.group, "max_tokens": options.new, "max_steps": steps}
    file = folder / f"{name}.toml"
    tables = {"training": sizes, "model": {"model": model, "lora_rank": options.rank}}
    return Contender(name=name, command=write_config(file, folder, options.device, tables), lines=LINES)


def _peer(
    name: str,
    options: argparse.Namespace,
    folder: Path,
    model: str,
    steps: int,
    *,
    is_checkpointing: bool = False,
    environ: dict[str, str] | None = None,
) -> Contender:
    settings = {
        "device": options.device,
        "tasks": str(folder),
        "model": model,
        "rank": options.rank,
        "batch": options.batch,
        "group": options.group,
        "new": options.new,
        "steps": steps,
        "rows_per_pass": options.peer_rows,
        "gradient_checkpointing": is_checkpointing,
    }
    file = folder / f"{name}.json"
    file.write_text(json.dumps(settings), encoding="utf-8")
    command = [options.peer_python, str(PEER), str(file)]
    return Contender(name=name, command=command, lines="steps.jsonl", environ=environ or {})


def _limits(options: argparse.Namespace, shape: Shape) -> tuple[float, float, str]:
    """Least seconds of sampling and of training, and where the device's rates are from."""
    item = 4 if options.device == "cpu" else 2
    one_thread = 1 if options.device == "cpu" and options.shape == "tiny" else 0
    peak = rates(options.device, item * (shape.projections + shape.head), one_thread)
    work = Work(rows=options.batch * options.group, group=options.group, prompt=options.prompt, new=options.new)
    drawn_s = decode(shape, work, item).seconds(peak) + prefill(shape, work, item).seconds(peak)
    rows = [(options.prompt, options.new)] * work.rows
    return drawn_s, training(shape, rows, options.rank, item, groups=work.groups).seconds(peak), peak.source


def _figures(runs: Sequence[Run], options: argparse.Namespace) -> dict[str, Any]:
    """Of one contender: its steps after the warm-up, and the peaks of its processes."""
    counted = [record for run in runs for record in run.records[options.warm_up :]]
    rounds_s = [run.periods_s(options.warm_up) for run in runs]
    if any(len(run.records) != options.warm_up + options.steps // options.rounds for run in runs):
        sys.exit("a run ended without an error and without all of its steps")
    return {
        "step_s": Spread.of([period for periods in rounds_s for period in periods]),
        "rounds_s": rounds_s,
        "sample_s": Spread.of([record["sample_time_s"] for record in counted]),
        "train_s": Spread.of([record["train_time_s"] for record in counted]),
        "tokens_per_completion": sum(record["mean_tokens"] for record in counted) / len(counted),
        "used_s": statistics.median(run.used_per_period_s(options.warm_up) for run in runs),
        "first_step_s": [run.seen_s[0] for run in runs],
        "peak_bytes": max(run.device_bytes or run.peak_bytes for run in runs),
        "process_bytes": [run.peak_bytes for run in runs],
        "tree_bytes": [run.tree_bytes for run in runs],
    }


def _row(name: str, figures: dict[str, Any]) -> list[str]:
    return [
        name,
        report.seconds(figures["step_s"]),
        report.times(figures["ratio"]) if COMPARED[name] != name else "1",
        f"{figures['used_s']:.3f} s",
        f"{figures['used_ratio']:.2f}",
        report.seconds(figures["sample_s"]),
        report.seconds(figures["train_s"]),
        f"{figures['tokens_per_completion']:.1f}",
        report.mebibytes(figures["peak_bytes"]),
        f"{figures['memory_ratio']:.2f}",
    ]


if __name__ == "__main__":
    main()
