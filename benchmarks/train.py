"""One optimizer step, ours beside plain padded training: `python benchmarks/train.py [--device cuda --shape qwen3-4b]`.

128 rows of mixed lengths (completions from a quarter of `--new` up to all of it, after a prompt per group): ours
through its backend; and transformers with PEFT on padded rows with the logits of every position. The same rows for
both, so the same useful tokens. MFU: operations that the step needs without padding, a group's prompt once, over what
the device does at most; recomputation does not count. Each round starts every contender anew.

"Of products", on a CPU: the same operations over what bare products of the model's projections do here, forward and
back, at the size of a pass. `--model DIR` takes the model in a folder, `--fixed` completions of full length only:

    python benchmarks/train.py --model SmolLM2 --dtype fp32 --batch 4 --group 8 --new 48 --fixed --calls 2 --rounds 1

`--vocabulary 1 2 4` (with `--batch 2 --peer-rows 8` it takes a minute) measures the step's memory against the
vocabulary instead, at these multiples of the shape's own (of 32,768 for the built-in model, whose 512 would show
nothing). Every row then has full length.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import report
from harness.figures import Spread, growth, ratios
from harness.limits import Shape, training
from harness.machine import Rates, machine, rates
from harness.models import (
    ITEM_BYTES,
    SHAPES,
    add_model_options,
    endless_model,
    model_name,
    our_model,
    peer_dtype,
    table_name,
)
from harness.processes import Run
from harness.products import training_rate, with_one_thread
from harness.rounds import Contender, add_only, chosen, run_rounds
from harness.runs import questions, write_config, write_tasks

WORKERS = Path(__file__).parent / "workers"
OURS, PADDED, RECOMPUTED = "retrain", "padded, all logits", "padded, all logits, activations checkpointed"
ALONE = ", 1 thread"
NAMES = (OURS, OURS + ALONE, PADDED, PADDED + ALONE, RECOMPUTED)
PASS_TOKENS = 1536  # of ours on a CPU, at most
FIRST_ID = 3  # below are special tokens
SMALLEST_VOCABULARY = 32_768
Row = tuple[list[int], int]  # tokens, and how many of them are the prompt


def main() -> None:
    """Measure, print, write."""
    options = _options()
    where = machine(options.device, options.peer_python)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.folder or scratch).resolve()
        compare = _against_vocabulary if options.vocabulary else _side_by_side
        compare(options, folder, where).publish(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--batch", type=int, default=8, help="prompts")
    parser.add_argument("--group", type=int, default=16, help="rows per prompt")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a prompt; 0 = 32 on a CPU, 256 on CUDA")
    parser.add_argument("--new", type=int, default=0, help="tokens of a completion at most; 0 = 64 on a CPU, else 1024")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=0, help="measured steps in a round; 0 = 5 on a CPU, 2 on CUDA")
    parser.add_argument("--fixed", action="store_true", help="every completion has full length")
    text = "threads of the peers on a CPU; 0 = PyTorch's default; 1 for the built-in model, else 0"
    parser.add_argument("--threads", type=int, help=text)
    add_only(parser, NAMES)
    parser.add_argument("--peer-rows", type=int, default=0, help="rows per pass of the peers; 0 = 32 on a CPU, else 4")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[], metavar="TIMES", help="see above")
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter with transformers and peft")
    parser.add_argument("--folder", default="", help="keep everything here")
    parser.add_argument("--quick", action="store_true", help="a small run that shows that everything works")
    report.add_output_options(parser)
    options = parser.parse_args()
    small = options.device == "cpu"
    options.prompt = options.prompt or (32 if small else 256)
    options.new = options.new or (64 if small else 1024)
    options.calls = options.calls or (5 if small else 2)
    if options.threads is None:
        options.threads = int(not options.model and options.shape == "tiny")
    options.threads = options.threads if small else 0
    options.peer_rows = options.peer_rows or (32 if small else 4)
    if options.vocabulary:
        options.calls, options.rounds = 1, 1  # memory is what counts
    if options.quick:
        options.batch, options.group, options.new, options.rounds, options.calls = 2, 4, 8, 1, 1
    return options


def _side_by_side(options: argparse.Namespace, folder: Path, where: dict[str, Any]) -> report.Report:
    model = endless_model(folder / "model", shape=options.shape, device=options.device, model=options.model)
    shape = Shape.read(model)
    rows = _rows(options, shape.vocabulary, is_mixed=not options.fixed)
    done = run_rounds(
        _contenders(options, folder, model, rows, names=_chosen(options)),
        options.rounds,
        folder / "runs",
        options.device,
    )
    dtype = peer_dtype(options)
    peak = rates(options.device, ITEM_BYTES[dtype] * (shape.projections + shape.head), options.threads, dtype)
    sizes = [(num_prompt, len(tokens) - num_prompt) for tokens, num_prompt in rows]
    least = training(shape, sizes, options.rank, ITEM_BYTES[dtype], groups=options.batch)
    tokens = min(PASS_TOKENS, sum(map(sum, sizes)))
    products = with_one_thread(options, partial(training_rate, shape, tokens, folder))
    found = {name: _figures(mine, sum(map(sum, sizes)), least.operations, peak) for name, mine in done.runs.items()}
    for name, figures in found.items():
        figures["ratio"] = ratios(found[OURS]["rounds_s"] if OURS in found else None, figures["rounds_s"])
        rate = products[ALONE in name]
        figures["products_frac"] = rate and least.operations / figures["step_s"].median / rate
    return report.Report(
        name=table_name("train", options),
        columns=(
            "",
            "step",
            "x ours",
            "processor",
            "tokens/s",
            "MFU",
            "of products",
            "memory of the step",
            "rows per pass",
        ),
        rows=[
            [
                name,
                report.seconds(each["step_s"]),
                report.times(each["ratio"]) if name != OURS else "1",
                f"{each['used_s']:.3g} s",
                f"{each['tokens_per_s']:,.0f}",
                f"{each['mfu']:.0%}",
                report.percent(each["products_frac"]),
                report.mebibytes(each["step_bytes"]),
                str(each["rows_per_pass"]),
            ]
            for name, each in found.items()
        ],
        notes=(
            f"{len(rows)} rows ({options.batch} x {options.group}), {sum(map(sum, sizes)):,} tokens with prompts, rank",
            f"{options.rank}, {model_name(options)}. It needs {least.operations / 1e12:.3g} Tflop; the device does",
            f"{peak.operations_per_s / 1e12:.3g} Tflop/s ({peak.source}). Memory: what the step needs at its peak",
            "beyond what was there before it.",
        ),
        figures={
            "settings": report.settings(options),
            "contenders": found,
            "limit": least,
            "rates": peak,
            "products_per_s": {"threads of the rows": products[False], "1 thread": products[True]},
        },
        machine=where,
        failures=done.failures,
    )


def _chosen(options: argparse.Namespace) -> list[str]:
    """What runs: one thread where it is not the setting of all."""
    left_out = {OURS + ALONE} if options.device != "cpu" else set()
    if options.device != "cpu" or options.threads == 1:
        left_out |= {PADDED + ALONE}
    able = [name for name in NAMES if name not in left_out]
    return chosen(options.only, able)


def _against_vocabulary(options: argparse.Namespace, folder: Path, where: dict[str, Any]) -> report.Report:
    """Every size in a process of its own; the slope says how much of the memory is rows x vocabulary."""
    own = SHAPES[options.shape].get("vocab_size", 0)
    base = own if own >= SMALLEST_VOCABULARY else SMALLEST_VOCABULARY
    found: dict[str, dict[int, int | None]] = {OURS: {}, PADDED: {}}
    for factor in options.vocabulary:
        size, place = factor * base, folder / str(factor)
        model = endless_model(place / "model", shape=options.shape, vocabulary=size, device=options.device)
        rows = _rows(options, size, is_mixed=False)
        contenders = _contenders(options, place, model, rows, names=(OURS, PADDED))
        done = run_rounds(contenders, 1, place / "runs", options.device)
        if done.failures:
            sys.exit(f"failed at a vocabulary of {size:,}: {done.failures}")
        for name, runs in done.runs.items():
            peaks = [record["step_bytes"] for record in runs[0].records if record["step_bytes"] is not None]
            found[name][size] = max(peaks) if peaks else None
    tokens = options.batch * options.group * (options.prompt + options.new)
    return report.Report(
        name="vocabulary",
        columns=("", *(f"vocabulary {factor * base:,}" for factor in options.vocabulary), "exponent"),
        rows=[
            [name, *(report.mebibytes(count) for count in peaks.values()), _exponent(peaks)]
            for name, peaks in found.items()
        ],
        notes=(
            f"Memory of one optimizer step on {tokens:,} tokens, shape {options.shape}, beyond weights and optimizer;",
            f"the padded peer takes {options.peer_rows} rows at a time. The exponent is that of memory against",
            "vocabulary: 0 where no tensor has a position and a vocabulary axis, 1 where such tensors are all.",
        ),
        figures={"settings": report.settings(options), "step_bytes": found, "tokens": tokens},
        machine=where,
    )


def _exponent(peaks: dict[int, int | None]) -> str:
    known = {size: peak for size, peak in peaks.items() if peak}
    if len(known) < 2:
        return "-"
    return f"{growth(list(known), list(map(float, known.values()))).exponent:.2f}"


def _rows(options: argparse.Namespace, vocabulary: int, *, is_mixed: bool) -> list[Row]:
    stream = random.Random(0)
    rows = []
    for _ in range(options.batch):
        prompt = [stream.randrange(FIRST_ID, vocabulary) for _ in range(options.prompt)]
        for _ in range(options.group):
            count = stream.randint(max(1, options.new // 4), options.new) if is_mixed else options.new
            rows.append((prompt + [stream.randrange(FIRST_ID, vocabulary) for _ in range(count)], options.prompt))
    return rows


def _contenders(
    options: argparse.Namespace, folder: Path, model: Path, rows: list[Row], *, names: Sequence[str]
) -> list[Contender]:
    write_tasks(folder, questions(1))
    write_config(folder / "config.toml", folder, options.device, {"model": our_model(options, model)})
    found = []
    for number, name in enumerate(names):
        settings = {
            "device": "cpu" if options.device == "cpu" else "cuda:0",
            "dtype": peer_dtype(options),
            "model": str(model),
            "config": str(folder / "config.toml"),
            "rank": options.rank,
            "rows": rows,
            "warm_rows": 2,
            "calls": options.calls,
            "rows_per_pass": options.peer_rows,
            "recompute": name == RECOMPUTED,
        }
        file = folder / f"settings-{number}.json"
        file.write_text(json.dumps(settings), encoding="utf-8")
        ours = [sys.executable, str(WORKERS / "policy.py"), "train", str(file)]
        peer = [options.peer_python, str(WORKERS / "padded.py"), str(file)]
        is_ours = name.startswith(OURS)
        threads = 1 if ALONE in name else 0 if is_ours else options.threads
        found.append(
            Contender(
                name=name,
                command=ours if is_ours else peer,
                lines="calls.jsonl",
                count=options.calls,
                environ={"OMP_NUM_THREADS": str(threads)} if threads else {},
            )
        )
    return found


def _figures(runs: list[Run], tokens: int, operations: float, peak: Rates) -> dict[str, Any]:
    rounds_s = [[record["seconds"] for record in run.records] for run in runs]
    step_s = Spread.of([seconds for row in rounds_s for seconds in row])
    peaks = [record["step_bytes"] for run in runs for record in run.records if record["step_bytes"] is not None]
    return {
        "step_s": step_s,
        "rounds_s": rounds_s,
        "used_s": statistics.median(record["used_s"] for run in runs for record in run.records),
        "tokens_per_s": tokens / step_s.median,
        "mfu": operations / step_s.median / peak.operations_per_s,
        "step_bytes": max(peaks) if peaks else None,
        "rows_per_pass": runs[-1].records[-1].get("rows_per_pass", "own"),
        "process_bytes": max(run.peak_bytes for run in runs),
    }


if __name__ == "__main__":
    main()
