"""Sampling, ours beside transformers': `python benchmarks/sample.py [--device cuda --shape qwen3-4b]`.

128 completions of a step, all as long as `--new`: our engine through its backend, `generate` with one batch and one
cache, and `generate_batch`, transformers' continuous batching. Ours returns log-probabilities and entropies too, which
the others do not compute. Each round starts every contender anew; its first call does not count.

On CUDA the fraction of the bandwidth limit is given: what must be read (the weights once per token step, keys and
values of every row) over what the card reads per second, divided by the measured time. On a CPU the operations count
as well.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import report
from harness.figures import Spread, ratios
from harness.limits import Shape, Work, decode, prefill
from harness.machine import machine, rates
from harness.models import SHAPES, endless_model
from harness.processes import Run
from harness.rounds import Contender, run_rounds
from harness.runs import questions, write_config, write_tasks

WORKERS = Path(__file__).parent / "workers"
OURS = "retrain"
PEERS = {"transformers generate": "generate", "transformers continuous batching": "continuous"}
FIRST_ID = 3  # below are special tokens


def main() -> None:
    """Measure, print, write."""
    options = _options()
    where = machine(options.device, options.peer_python)
    work = Work(rows=options.batch * options.group, group=options.group, prompt=options.prompt, new=options.new)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.folder or scratch).resolve()
        model = endless_model(folder / "model", shape=options.shape, device=options.device)
        shape = Shape.read(model)
        runs = run_rounds(_contenders(options, folder, model, shape), options.rounds, folder / "runs", options.device)
    found = {name: _figures(mine, work) for name, mine in runs.items()}
    item = 4 if options.device == "cpu" else 2
    peak = rates(options.device, item * (shape.projections + shape.head), options.threads)
    limits = decode(shape, work, item), prefill(shape, work, item)
    least_s = sum(limit.seconds(peak) for limit in limits)
    for figures in found.values():
        figures["ratio"] = ratios(found[OURS]["rounds_s"], figures["rounds_s"])
        figures["limit_fraction"] = least_s / figures["call_s"].median
    report.Report(
        name="sample",
        columns=("", "call", "x ours", "tokens/s", "of the limit", "memory of the call"),
        rows=[_row(name, figures) for name, figures in found.items()],
        notes=(
            f"{work.groups} x {work.group} completions of {work.new} tokens after prompts of {work.prompt} tokens,",
            f"shape {options.shape}. Limit: {least_s:.3g} s, from {limits[0].moved_bytes / 1e9:.3g} GB moved at",
            f"{peak.bytes_per_s / 1e9:,.0f} GB/s and {limits[0].operations / 1e12:.3g} Tflop at",
            f"{peak.operations_per_s / 1e12:.3g} Tflop/s ({peak.source}).",
        ),
        figures={"settings": report.settings(options), "contenders": found, "limit_s": least_s, "rates": peak},
        machine=where,
    ).publish(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny", help="random weights unless it is tiny")
    parser.add_argument("--batch", type=int, default=8, help="prompts")
    parser.add_argument("--group", type=int, default=16, help="completions per prompt")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a prompt; 0 = 32 on a CPU, 256 on CUDA")
    parser.add_argument("--new", type=int, default=0, help="tokens of a completion; 0 = 64 on a CPU, 1024 on CUDA")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=0, help="measured calls in a round; 0 = 5 on a CPU, 1 on CUDA")
    parser.add_argument("--threads", type=int, default=1, help="threads of the peers on a CPU; 0 = PyTorch's default")
    parser.add_argument("--kv-cache-dtype", default="auto", help="ours: [inference] kv_cache_dtype")
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter with transformers")
    parser.add_argument("--folder", default="", help="keep everything here")
    parser.add_argument("--quick", action="store_true", help="a small run that shows that everything works")
    report.add_output_options(parser)
    options = parser.parse_args()
    small = options.device == "cpu"
    options.prompt = options.prompt or (32 if small else 256)
    options.new = options.new or (64 if small else 1024)
    options.calls = options.calls or (5 if small else 1)
    options.threads = options.threads if small else 0
    if options.quick:
        options.batch, options.group, options.new, options.rounds, options.calls = 2, 4, 8, 1, 1
    return options


def _contenders(options: argparse.Namespace, folder: Path, model: Path, shape: Shape) -> list[Contender]:
    stream = random.Random(0)
    settings = {
        "device": "cpu" if options.device == "cpu" else "cuda:0",
        "model": str(model),
        "new": options.new,
        "group": options.group,
        "threads": options.threads,
        "calls": [
            [
                [stream.randrange(FIRST_ID, shape.vocabulary) for _ in range(options.prompt)]
                for _ in range(options.batch)
            ]
            for _ in range(options.calls + 1)
        ],
        "config": str(folder / "config.toml"),
    }
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    write_tasks(folder, questions(1))
    tables: dict[str, dict[str, Any]] = {"model": {"model": str(model)}}
    if options.kv_cache_dtype != "auto":
        tables["inference"] = {"kv_cache_dtype": options.kv_cache_dtype}
    write_config(folder / "config.toml", folder, options.device, tables)
    file = str(folder / "settings.json")
    ours = Contender(
        name=OURS, command=[sys.executable, str(WORKERS / "policy.py"), "sample", file], lines="calls.jsonl"
    )
    return [ours] + [
        Contender(
            name=name, command=[options.peer_python, str(WORKERS / "generate.py"), how, file], lines="calls.jsonl"
        )
        for name, how in PEERS.items()
    ]


def _figures(runs: list[Run], work: Work) -> dict[str, Any]:
    rounds_s = [[record["seconds"] for record in run.records[1:]] for run in runs]
    call_s = Spread.of([seconds for row in rounds_s for seconds in row])
    peaks = [record["step_bytes"] for run in runs for record in run.records if record["step_bytes"] is not None]
    return {
        "call_s": call_s,
        "rounds_s": rounds_s,
        "tokens_per_s": work.rows * work.new / call_s.median,
        "call_bytes": max(peaks) if peaks else None,
        "process_bytes": max(run.peak_bytes for run in runs),
    }


def _row(name: str, figures: dict[str, Any]) -> list[str]:
    return [
        name,
        report.seconds(figures["call_s"]),
        report.times(figures["ratio"]) if name != OURS else "1",
        f"{figures['tokens_per_s']:,.0f}",
        f"{figures['limit_fraction']:.0%}",
        report.mebibytes(figures["call_bytes"]),
    ]


if __name__ == "__main__":
    main()
