"""Which learning rate is best at each rank of the adapter: `python benchmarks/adapter_rank.py [--model builtin:tiny]`.

For each rule of scale, rank and learning rate a model learns to answer sums with a bare number (supervised steps, then
one small step of the trainer, which a run needs). The score is the mean loss of the last quarter of the steps; the best
rate is the lowest point of a parabola through the three lowest scores over log(rate). A rule keeps rank and step size
apart if that rate is the same at all ranks. All weights are trained, too: their best rate is the lower one.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

import retrain

# Alpha of each rank, and whether it is divided by the root of the rank.
RULES = {"auto: 32 / rank": (lambda rank: 32, False), "default: 2": (lambda rank: 2 * rank, False)}
ROOT = {"32 / sqrt(rank)": (lambda rank: 32, True)}


def score(model: str, steps: int, batch: int, lr: float, rank: int, alpha: int = 0, *, is_root: bool = False) -> float:
    """Mean loss of the last quarter of the supervised steps; infinite if it is not finite."""
    config: dict[str, dict[str, Any]] = {
        "model": {"model": model, "lora_rank": rank},
        "lora": {"alpha": alpha, "rslora": is_root} if rank else {},
        "backend": {"backend": "local", "devices": "cpu"},
        "training": {"max_steps": 1, "batch_size": 1, "group_size": 2, "max_tokens": 4, "seed": 1, "save_every": 0},
        "sft": {"steps": steps, "batch_size": batch, "lr": lr},
        "data": {"source": "arithmetic"},
        "eval": {"examples": 0},
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            with redirect_stdout(io.StringIO()):
                retrain.train(config, log_dir=f"{folder}/run", quiet=True)
        except retrain.RetrainError:  # it diverged, and stopped itself
            return math.inf
        lines = map(json.loads, (Path(folder) / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines())
        losses = [line["sft_loss"] for line in lines if line.get("sft_loss") is not None]
    found = float(np.mean(losses[-max(1, steps // 4) :]))
    return found if math.isfinite(found) else math.inf


def best_rate(rates: list[float], scores: list[float]) -> tuple[float, bool]:
    """The rate of the lowest score between the rates tried, and whether it lies at their edge."""
    at = int(np.argmin(scores))
    near = slice(at - 1, at + 2)
    if not 0 < at < len(rates) - 1 or not np.isfinite(scores[near]).all():
        return rates[at], True
    a, b, _ = np.polyfit(np.log(rates[near]), scores[near], 2)
    return float(np.exp(-b / (2 * a))), False


def main() -> None:
    """Train all of them, and print a line for each rule and rank."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4, 16, 64, 128])
    parser.add_argument("--rates", type=lambda text: [float(n) for n in text.split(",")], default=None)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--root", action="store_true", help="alpha / sqrt(rank), too")
    args = parser.parse_args()
    rates = args.rates or [2.0**power * 1e-3 for power in range(8)]
    print(f"{args.model}: {args.steps} steps of {args.batch} examples, {time.strftime('%Y-%m-%d', time.gmtime())}\n")
    heads = ["rule", "rank", "best lr", *(f"{rate:.2g}" for rate in rates)]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    best: dict[str, list[float]] = {}
    for rule, (alpha, is_root) in (RULES | (ROOT if args.root else {})).items():
        for rank in args.ranks:
            scores = [score(args.model, args.steps, args.batch, lr, rank, alpha(rank), is_root=is_root) for lr in rates]
            best.setdefault(rule, []).append(_line(rule, rank, rates, scores))
    lower = [rate / 10 for rate in rates]
    whole = _line("all weights, lr / 10", 0, lower, [score(args.model, args.steps, args.batch, lr, 0) for lr in lower])
    print()
    for rule, found in best.items():
        middle = float(np.exp(np.mean(np.log(found))))
        spread = max(found) / min(found)
        print(f"{rule}: best rates differ by a factor of {spread:.3g}; {middle / whole:.3g} times that of all weights")


def _line(rule: str, rank: int, rates: list[float], scores: list[float]) -> float:
    rate, is_edge = best_rate(rates, scores)
    cells = [rule, str(rank), f"{rate:.2g}{' (edge)' if is_edge else ''}", *(f"{each:.3f}" for each in scores)]
    print(f"| {' | '.join(cells)} |", flush=True)
    return rate


if __name__ == "__main__":
    main()
