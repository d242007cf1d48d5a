"""A whole RL step, ours beside TRL's: `python benchmarks/step.py [--steps 20] [--json FILE] [--markdown FILE]`.

Both train `builtin:tiny`, or the model of `--model DIR`, on the same tasks, 8 prompts with 16 completions each, through
their own loops: `retrain` with a configuration file, TRL 1.16's GRPOTrainer in an environment of its own. A step is the
time from one line of a run's records to the next, seen from outside. Each round starts every contender anew, in
alternating order.

Fixed lengths: a copy of the model without an end of sequence, so that all draw exactly `max_tokens`. Natural lengths:
the model as it is. TRL checkpoints activations by default; the main rows do without on both sides. With several sizes
in `--peer-rows` TRL takes the one whose first steps are fastest.

    python benchmarks/step.py --model SmolLM2 --dtype fp32 --batch 4 --group 8 --new 48 --steps 6 --rounds 2 --warm-up 1
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import account, report
from harness.figures import Spread, ratios
from harness.limits import Shape, Work, decode, prefill, training
from harness.machine import Rates, machine, rates
from harness.models import (
    ITEM_BYTES,
    add_model_options,
    endless_model,
    model_name,
    natural_model,
    our_model,
    peer_dtype,
    prompt_tokens,
    table_name,
)
from harness.processes import Failed, Run
from harness.rounds import ONE_THREAD, Contender, add_only, chosen, run_one, run_rounds
from harness.runs import LINES, PLAIN_PROMPT, questions, write_config, write_tasks
from peers.environment import peer_python

PEER = Path(__file__).parent / "workers/trl_grpo.py"
OURS, NATURAL, PEER_NAME = "retrain", "retrain, natural lengths", "TRL"
RATIOS = {"used": "used_s", "memory": "peak_bytes"}  # columns that are compared, and the figure they compare
COMPARED = {  # name -> the row of ours that it is held against
    OURS: OURS,
    "retrain, 1 thread": OURS,
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
        model = endless_model(folder / "model", shape=options.shape, device=options.device, model=options.model)
        tried = "" if options.account else _choose_peer_rows(options, folder, model)
        prompt = prompt_tokens(model) if options.model else options.prompt
        if options.account:
            _publish_account(options, folder, model, prompt, where)
            return
        done = run_rounds(_contenders(options, folder, model), options.rounds, folder / "runs", options.device)
        drawn_s, trained_s, source = _limits(options, Shape.read(model), prompt)
    found = {name: figures_of(mine, options) for name, mine in done.runs.items()}
    for name, figures in found.items():
        mine = found.get(COMPARED[name], {})
        figures["ratio"] = ratios(mine.get("rounds_s"), figures["rounds_s"])
        for key in ("used", "memory"):
            figures[f"{key}_ratio"] = figures[RATIOS[key]] / max(mine[RATIOS[key]], 1e-9) if mine else None
    report.Report(
        name=table_name("step", options),
        columns=("", "step", "x ours", "processor", "x ours", "sampling", "training", "tokens", "memory", "x ours"),
        rows=[_row(name, figures) for name, figures in found.items()],
        notes=(
            f"{model_name(options)}, {options.batch} x {options.group} completions of at most {options.new} tokens,",
            f"prompts of {prompt}; {tried}",
            f"medians of {options.steps} steps with quartiles, rounds: {options.rounds}; `x ours` with the spread over",
            "rounds; tokens per completion.",
            f"The limits at fixed lengths: sampling {drawn_s:.3g} s and training {trained_s:.3g} s ({source});",
            _times_the_limits(found, drawn_s + trained_s),
        ),
        figures={
            "settings": report.settings(options),
            "contenders": found,
            "limits_s": {"sampling": drawn_s, "training": trained_s, "rates": source},
        },
        machine=where,
        failures=done.failures,
    ).publish(options)


def _publish_account(
    options: argparse.Namespace, folder: Path, model: Path, prompt: int, where: dict[str, Any]
) -> None:
    """One run of ours, watched from inside, beside the steps that its records tell."""
    steps = options.warm_up + options.steps
    write_tasks(folder, questions(options.batch * steps, options.prompt))
    contender = ours(OURS, options, folder, model, steps)
    contender = replace(contender, command=account.watched(list(contender.command), folder, LINES, options.warm_up))
    run = run_one(contender, folder / "account", options.device)
    parts, periods_s = account.read(folder, options.steps), run.periods_s(options.warm_up)
    shape, work = Shape.read(model), _work(options, prompt)
    bare = account.bare_s(shape, work, options.rank, ITEM_BYTES[peer_dtype(options)], _rates(options, shape))
    seen_s = statistics.fmean(periods_s)
    report.Report(
        name=table_name("account", options),
        columns=("part of a step", "time", "share", "times its limit"),
        rows=account.table(parts, bare),
        notes=(
            f"{model_name(options)}, {options.batch} x {options.group} completions of {options.new} tokens, prompts of",
            f"{prompt}; mean of {options.steps} steps of {seen_s:.3f} s by their records. Parts of the stacks that",
            "run, seen every 3 ms. A limit is the part's operations, or its bytes, at the rates of this machine.",
        ),
        figures={"settings": report.settings(options), "parts_s": parts, "limits_s": dict(bare), "step_s": seen_s},
        machine=where,
    ).publish(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--batch", type=int, default=8, help="prompts per step")
    parser.add_argument("--group", type=int, default=16, help="completions per prompt")
    parser.add_argument("--prompt", type=int, default=PLAIN_PROMPT, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens per completion, at most")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each, over all rounds")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=3, help="steps at the start of each process that do not count")
    text = "completions per pass of TRL, the fastest of several; 0 = all on a CPU, else 4"
    parser.add_argument("--peer-rows", type=int, nargs="+", default=[0], metavar="ROWS", help=text)
    parser.add_argument("--peer-python", default="", help="an interpreter that has TRL; else an environment is made")
    add_only(parser, tuple(COMPARED))
    parser.add_argument("--folder", default="", help="keep everything here")
    parser.add_argument("--account", action="store_true", help="in place of all that: the parts of our step")
    parser.add_argument("--quick", action="store_true", help="a small run that shows that everything works")
    report.add_output_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.batch, options.group, options.new = 2, 4, 8
        options.steps, options.rounds, options.warm_up = 2, 1, 1
    if options.steps % options.rounds:
        parser.error("--steps must be a multiple of --rounds")
    options.contenders = _chosen(options)
    is_alone = options.account or not any(name.startswith(PEER_NAME) for name in options.contenders)
    options.peer_python = sys.executable if is_alone else peer_python(PEER_NAME.lower(), options.peer_python)
    everything = options.batch * options.group
    options.peer_rows = [rows or (everything if options.device == "cpu" else 4) for rows in options.peer_rows]
    if any(everything % rows for rows in options.peer_rows):
        parser.error(f"--peer-rows must divide the {everything} completions of a step")
    return options


def _chosen(options: argparse.Namespace) -> list[str]:
    """Names of those that run: random weights have no length of their own, and everyone needs ours beside it."""
    can_end = options.model or options.shape == "tiny"
    able = [name for name in COMPARED if can_end or COMPARED[name] == OURS]
    wanted = chosen(options.only, able)
    return [name for name in COMPARED if name in {*wanted, *(COMPARED[each] for each in wanted)}]


def _choose_peer_rows(options: argparse.Namespace, folder: Path, model: Path) -> str:
    """Leave TRL's fastest size of a pass in `peer_rows`, and tell how it was found: one start of each, one step."""
    sizes = options.peer_rows
    options.peer_rows = sizes[0]
    if not any(name.startswith(PEER_NAME) for name in options.contenders):
        return ""
    if len(sizes) < 2:
        return f"TRL in passes of {sizes[0]};"
    write_tasks(folder, questions(options.batch * 2, options.prompt))
    taken_s: dict[int, float] = {}
    for rows in sizes:
        options.peer_rows = rows
        trial = peer(f"TRL in passes of {rows}", options, folder, str(model), 2)
        print(f"trying {trial.name}", file=sys.stderr, flush=True)
        try:
            taken_s[rows] = run_one(trial, folder / f"trial-{rows}", options.device).periods_s()[0]
        except Failed as error:
            print(error, file=sys.stderr, flush=True)
    options.peer_rows = min(taken_s, key=lambda rows: taken_s[rows]) if taken_s else sizes[0]
    told = ", ".join(f"{rows}: {seconds:.3g} s" for rows, seconds in taken_s.items())
    return f"TRL in passes of {options.peer_rows}, the fastest of {told};"


def _contenders(options: argparse.Namespace, folder: Path, endless: Path) -> list[Contender]:
    steps = options.warm_up + options.steps // options.rounds
    write_tasks(folder, questions(options.batch * steps, options.prompt))
    natural = natural_model(options)
    found = [
        ours(OURS, options, folder, endless, steps),
        ours("retrain, 1 thread", options, folder, endless, steps, environ=ONE_THREAD),
        peer("TRL", options, folder, str(endless), steps),
        peer("TRL, 1 thread", options, folder, str(endless), steps, environ=ONE_THREAD),
        peer(
            "TRL, its default (activations checkpointed)", options, folder, str(endless), steps, is_checkpointing=True
        ),
        ours(NATURAL, options, folder, natural, steps),
        peer("TRL, natural lengths", options, folder, str(natural), steps),
    ]
    return [each for each in found if each.name in options.contenders]


def ours(
    name: str,
    options: argparse.Namespace,
    folder: Path,
    model: Path,
    steps: int,
    environ: dict[str, str] | None = None,
) -> Contender:
    sizes = {"batch_size": options.batch, "group_size": options.group, "max_tokens": options.new, "max_steps": steps}
    file = folder / f"{name}.toml"
    tables = {"training": sizes, "model": our_model(options, model)}
    command = write_config(file, folder, options.device, tables)
    return Contender(name=name, command=command, lines=LINES, count=steps, environ=environ or {})


def peer(
    name: str,
    options: argparse.Namespace,
    folder: Path,
    model: str,
    steps: int,
    *,
    is_checkpointing: bool = False,
    exclude_modules: list[str] | None = None,
    environ: dict[str, str] | None = None,
) -> Contender:
    settings = {
        "device": options.device,
        "dtype": peer_dtype(options),
        "tasks": str(folder),
        "model": model,
        "rank": options.rank,
        "batch": options.batch,
        "group": options.group,
        "new": options.new,
        "steps": steps,
        "rows_per_pass": options.peer_rows,
        "gradient_checkpointing": is_checkpointing,
        "exclude_modules": exclude_modules,
    }
    file = folder / f"{name}.json"
    file.write_text(json.dumps(settings), encoding="utf-8")
    command = [options.peer_python, str(PEER), str(file)]
    return Contender(name=name, command=command, lines="steps.jsonl", count=steps, environ=environ or {})


def _limits(options: argparse.Namespace, shape: Shape, prompt: int) -> tuple[float, float, str]:
    """Least seconds of sampling and of training, and where the device's rates are from."""
    item, peak, work = ITEM_BYTES[peer_dtype(options)], _rates(options, shape), _work(options, prompt)
    drawn_s = decode(shape, work, item).seconds(peak) + prefill(shape, work, item).seconds(peak)
    rows = [(prompt, options.new)] * work.rows
    return drawn_s, training(shape, rows, options.rank, item, groups=work.groups).seconds(peak), peak.source


def _work(options: argparse.Namespace, prompt: int) -> Work:
    return Work(rows=options.batch * options.group, group=options.group, prompt=prompt, new=options.new)


def _rates(options: argparse.Namespace, shape: Shape) -> Rates:
    dtype = peer_dtype(options)
    one_thread = 1 if options.device == "cpu" and options.shape == "tiny" and not options.model else 0
    return rates(options.device, ITEM_BYTES[dtype] * (shape.projections + shape.head), one_thread, dtype)


def _times_the_limits(found: dict[str, dict[str, Any]], least_s: float) -> str:
    return f"our step takes {found[OURS]['step_s'].median / least_s:.2f} times their sum." if OURS in found else ""


def figures_of(runs: Sequence[Run], options: argparse.Namespace) -> dict[str, Any]:
    """Of one contender: its steps after the warm-up, and the peaks of its processes."""
    counted = [record for run in runs for record in run.records[options.warm_up :]]
    rounds_s = [run.periods_s(options.warm_up) for run in runs]
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
        report.plain(figures["used_ratio"]),
        report.seconds(figures["sample_s"]),
        report.seconds(figures["train_s"]),
        f"{figures['tokens_per_completion']:.1f}",
        report.mebibytes(figures["peak_bytes"]),
        report.plain(figures["memory_ratio"]),
    ]


if __name__ == "__main__":
    main()
