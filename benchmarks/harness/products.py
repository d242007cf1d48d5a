"""The bare products of a model's shapes, measured beside what is compared with them (CPU only)."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from harness.limits import Shape
from harness.models import peer_dtype

WORKER = Path(__file__).parents[1] / "workers/products.py"
FEW = 4  # different weights of a product that its operations decide, not its bytes
MANY = 256  # rows from which on they do


def decoding_s(shape: Shape, rows: int, folder: Path, *, dtype: str, threads: int) -> float:
    """Of one token step: every projection and the head once, with so many rows."""
    products = [[rows, outputs, inputs, shape.layers] for inputs, outputs in shape.fused]
    return _measure([*products, [rows, shape.vocabulary, shape.hidden, 1]], folder, dtype=dtype, threads=threads)


def training_rate(shape: Shape, rows: int, folder: Path, *, dtype: str, threads: int) -> float:
    """Operations per second of the projections of one pack of tokens, forward and back to the activations."""
    forward = [[rows, outputs, inputs, shape.layers] for inputs, outputs in shape.fused]
    backward = [[rows, inputs, outputs, shape.layers] for inputs, outputs in shape.fused]
    seconds = _measure([*forward, *backward], folder, dtype=dtype, threads=threads)
    return 4 * rows * shape.projections / seconds


def with_one_thread(options: argparse.Namespace, measure: Callable[..., float]) -> dict[bool, float | None]:
    """`measure` by whether a row has one thread, or as many as all others; of a CPU only."""
    if options.device != "cpu":
        return {True: None, False: None}
    dtype = peer_dtype(options)
    return {is_alone: measure(dtype=dtype, threads=1 if is_alone else options.threads) for is_alone in (True, False)}


def _measure(products: list[list[int]], folder: Path, *, dtype: str, threads: int) -> float:
    copies = FEW if products[0][0] >= MANY else max(times for *_, times in products)
    file = folder / "products.json"
    settings = {"products": products, "dtype": dtype, "threads": threads, "copies": copies}
    file.write_text(json.dumps(settings), encoding="utf-8")
    done = subprocess.run([sys.executable, str(WORKER), str(file)], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["seconds"])
