"""Sampling, ours beside transformers': `python benchmarks/sample.py [--device cuda --shape qwen3-4b | --model DIR]`.

128 completions of a step, all as long as `--new`: our engine through its backend, `generate` with one batch and one
cache, and `generate_batch`, transformers' continuous batching. Ours returns log-probabilities and entropies too, which
the others do not compute. Each round starts every contender anew; its first call does not count.

With `--server-python`, an interpreter that has vLLM, the same model on a server on this machine, too: through our
engine `vllm`, as a run uses it, and asked alone, without an adapter and without log-probabilities.

    python benchmarks/sample.py --model SmolLM2 --dtype fp32 --batch 4 --group 8 --new 48 --calls 2 --rounds 1

On CUDA the fraction of the bandwidth limit is given: what must be read (the weights once per token step, keys and
values of every row) over what the card reads per second, divided by the measured time. On a CPU the operations count
as well. "Of bare products", on a CPU: the products of every projection and of the head for one token step, measured
here with as many rows and threads, by the time of a token step, in which a call with one token is left out.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from harness import report
from harness.figures import Spread, ratios
from harness.limits import Shape, Work, decode, prefill
from harness.machine import machine, rates
from harness.models import (
    ITEM_BYTES,
    add_model_options,
    endless_model,
    model_name,
    our_model,
    peer_dtype,
    table_name,
)
from harness.processes import Run
from harness.products import decoding_s, with_one_thread
from harness.rounds import Contender, add_only, chosen, run_rounds
from harness.runs import questions, write_config, write_tasks

WORKERS = Path(__file__).parent / "workers"
OURS = "retrain"
GENERATE, CONTINUOUS = "transformers generate", "transformers continuous batching"
ENGINE, SERVER = "retrain, engine vllm", "vLLM alone"
PROGRAMS = {
    OURS: ("policy.py", "sample"),
    GENERATE: ("generate.py", "generate"),
    CONTINUOUS: ("generate.py", "continuous"),
    ENGINE: ("served.py", "engine"),
    SERVER: ("served.py", "alone"),
}
ALONE = ", 1 thread"
NAMES = (OURS, OURS + ALONE, GENERATE, GENERATE + ALONE, CONTINUOUS, ENGINE, SERVER)
FIRST_ID = 3  # below are special tokens


def main() -> None:
    """Measure, print, write."""
    options = _options()
    where = machine(options.device, options.peer_python)
    work = Work(rows=options.batch * options.group, group=options.group, prompt=options.prompt, new=options.new)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.folder or scratch).resolve()
        model = endless_model(folder / "model", shape=options.shape, device=options.device, model=options.model)
        shape = Shape.read(model)
        done = run_rounds(_contenders(options, folder, model, shape), options.rounds, folder / "runs", options.device)
        bare_s = with_one_thread(options, partial(decoding_s, shape, work.rows, folder))
    found = {name: call_figures(mine, work, bare_s[ALONE in name]) for name, mine in done.runs.items()}
    dtype = peer_dtype(options)
    item = ITEM_BYTES[dtype]
    peak = rates(options.device, item * (shape.projections + shape.head), options.threads, dtype)
    limits = decode(shape, work, item), prefill(shape, work, item)
    least_s = sum(limit.seconds(peak) for limit in limits)
    for figures in found.values():
        figures["ratio"] = ratios(found[OURS]["rounds_s"] if OURS in found else None, figures["rounds_s"])
        figures["limit_fraction"] = least_s / figures["call_s"].median
    report.Report(
        name=table_name("sample", options),
        columns=(
            "",
            "call",
            "x ours",
            "processor",
            "tokens/s",
            "of the limit",
            "decoding, of bare products",
            "memory of the call",
        ),
        rows=[_row(name, figures) for name, figures in found.items()],
        notes=(
            f"{work.groups} x {work.group} completions of {work.new} tokens after prompts of {work.prompt} tokens,",
            f"{model_name(options)}. Limit: {least_s:.3g} s, from {limits[0].moved_bytes / 1e9:.3g} GB moved at",
            f"{peak.bytes_per_s / 1e9:,.0f} GB/s and {limits[0].operations / 1e12:.3g} Tflop at",
            f"{peak.operations_per_s / 1e12:.3g} Tflop/s ({peak.source}).",
        ),
        figures={
            "settings": report.settings(options),
            "contenders": found,
            "limit_s": least_s,
            "rates": peak,
            "token_step_products_s": {"threads of the rows": bare_s[False], "1 thread": bare_s[True]},
        },
        machine=where,
        failures=done.failures,
    ).publish(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--batch", type=int, default=8, help="prompts")
    parser.add_argument("--group", type=int, default=16, help="completions per prompt")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a prompt; 0 = 32 on a CPU, 256 on CUDA")
    parser.add_argument("--new", type=int, default=0, help="tokens of a completion; 0 = 64 on a CPU, 1024 on CUDA")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=0, help="measured calls in a round; 0 = 5 on a CPU, 1 on CUDA")
    parser.add_argument("--rank", type=int, default=16)
    text = "threads of the peers on a CPU; 0 = PyTorch's default; 1 for the built-in model, else 0"
    parser.add_argument("--threads", type=int, help=text)
    parser.add_argument("--kv-cache-dtype", default="auto", help="ours: [inference] kv_cache_dtype")
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter with transformers")
    parser.add_argument("--server-python", default="", help="an interpreter with vLLM for this device")
    add_only(parser, NAMES)
    parser.add_argument("--folder", default="", help="keep everything here")
    parser.add_argument("--quick", action="store_true", help="a small run that shows that everything works")
    report.add_output_options(parser)
    options = parser.parse_args()
    small = options.device == "cpu"
    options.prompt = options.prompt or (32 if small else 256)
    options.new = options.new or (64 if small else 1024)
    options.calls = options.calls or (5 if small else 1)
    if options.threads is None:
        options.threads = int(not options.model and options.shape == "tiny")
    options.threads = options.threads if small else 0
    if options.quick:
        options.batch, options.group, options.new, options.rounds, options.calls = 2, 4, 8, 1, 1
    options.names = _chosen(options)
    return options


def _chosen(options: argparse.Namespace) -> list[str]:
    """What runs: servers if there is one, one thread where it is not the setting of all."""
    left_out = set() if options.server_python else {ENGINE, SERVER}
    if options.device != "cpu":
        left_out |= {OURS + ALONE, GENERATE + ALONE}
    elif options.threads == 1:
        left_out |= {GENERATE + ALONE}
    able = [name for name in NAMES if name not in left_out]
    return chosen(options.only, able)


def _contenders(options: argparse.Namespace, folder: Path, model: Path, shape: Shape) -> list[Contender]:
    write_tasks(folder, questions(1))
    tables: dict[str, dict[str, Any]] = {"model": our_model(options, model)}
    if options.kv_cache_dtype != "auto":
        tables["inference"] = {"kv_cache_dtype": options.kv_cache_dtype}
    write_config(folder / "config.toml", folder, options.device, tables)
    return [contender(name, options, folder, model, shape.vocabulary) for name in options.names]


def contender(name: str, options: argparse.Namespace, folder: Path, model: Path, vocabulary: int) -> Contender:
    stream, plain = random.Random(0), name.removesuffix(ALONE)
    lengths = [options.new, *([1] if plain != CONTINUOUS else []), *[options.new] * options.calls]
    calls = [
        {
            "prompts": [
                [stream.randrange(FIRST_ID, vocabulary) for _ in range(options.prompt)] for _ in range(options.batch)
            ],
            "new": new,
        }
        for new in lengths
    ]
    settings = {
        "device": "cpu" if options.device == "cpu" else "cuda:0",
        "dtype": peer_dtype(options),
        "model": str(model),
        "group": options.group,
        "rank": options.rank,
        "calls": calls,
        "config": str(folder / "config.toml"),
        "server_python": options.server_python,
    }
    file = folder / f"settings-{NAMES.index(name)}.json"
    file.write_text(json.dumps(settings), encoding="utf-8")
    is_peer = plain in (GENERATE, CONTINUOUS)
    python = options.peer_python if is_peer else sys.executable
    program, how = PROGRAMS[plain]
    threads = 1 if ALONE in name else options.threads if is_peer else 0
    return Contender(
        name=name,
        command=[python, str(WORKERS / program), how, str(file)],
        lines="calls.jsonl",
        count=len(calls),
        environ={"OMP_NUM_THREADS": str(threads)} if threads else {},
    )


def call_figures(runs: list[Run], work: Work, bare_s: float | None) -> dict[str, Any]:
    """Of one contender; `bare_s` are the products of a token step."""
    measured = [[record for record in run.records[1:] if record["new"] == work.new] for run in runs]
    short_s = [record["seconds"] for run in runs for record in run.records[1:] if record["new"] == 1]
    rounds_s = [[record["seconds"] for record in row] for row in measured]
    call_s = Spread.of([seconds for row in rounds_s for seconds in row])
    peaks = [record["step_bytes"] for row in measured for record in row if record["step_bytes"] is not None]
    products_frac = None
    if bare_s is not None and short_s and work.new > 1:
        products_frac = bare_s * (work.new - 1) / (call_s.median - statistics.median(short_s))
    return {
        "call_s": call_s,
        "rounds_s": rounds_s,
        "used_s": statistics.median(record["used_s"] for row in measured for record in row),
        "tokens_per_s": work.rows * work.new / call_s.median,
        "products_frac": products_frac,
        "call_bytes": max(peaks) if peaks else None,
        "process_bytes": max(run.peak_bytes for run in runs),
    }


def _row(name: str, figures: dict[str, Any]) -> list[str]:
    return [
        name,
        report.seconds(figures["call_s"]),
        report.times(figures["ratio"]) if name != OURS else "1",
        f"{figures['used_s']:.3g} s",
        f"{figures['tokens_per_s']:,.0f}",
        f"{figures['limit_fraction']:.0%}",
        report.percent(figures["products_frac"]),
        report.mebibytes(figures["call_bytes"]),
    ]


if __name__ == "__main__":
    main()
