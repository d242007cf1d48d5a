"""What a device does at most: `python rates.py DEVICE THREADS SIZE [DTYPE]`, one JSON object.

Bytes/s of reading and writing SIZE bytes (what fits into a processor's cache stays there), operations/s of a square
matrix product in DTYPE: `fp32`, which a CPU does by default, or `bf16`, a GPU's default.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

REPEATS = 9
MIN_S = 0.01  # of a repeat: shorter work is done several times


def main() -> None:
    """Measure and print."""
    device, threads, size = torch.device(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    if threads:
        torch.set_num_threads(threads)
    on_gpu = device.type == "cuda"
    named = sys.argv[4] if len(sys.argv) > 4 else "bf16" if on_gpu else "fp32"
    dtype, width = {"fp32": torch.float32, "bf16": torch.bfloat16}[named], 8192 if on_gpu else 1536
    source = torch.zeros(size // 8, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    copy_s = _fastest_s(lambda: target.copy_(source), device)
    product_s = _fastest_s(lambda: left @ right, device)
    print(json.dumps({"bytes_per_s": size / copy_s, "operations_per_s": 2 * width**3 / product_s}))


def _fastest_s(work: Callable[[], object], device: torch.device) -> float:
    once_s = _time_s(work, device, 1)
    count = max(1, round(MIN_S / once_s))
    return min(_time_s(work, device, count) for _ in range(REPEATS))


def _time_s(work: Callable[[], object], device: torch.device, count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / count


if __name__ == "__main__":
    main()
