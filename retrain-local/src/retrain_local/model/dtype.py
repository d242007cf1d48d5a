"""The dtype of frozen weights and activations: `[model] dtype`, refused where the CPU only emulates it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn import functional

from retrain.api import Config, ConfigError, Problem
from retrain_local.options import ModelKeys
from retrain_local.sizes import AUTO_DTYPE

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS, WIDTH = 128, 512  # of the product that is timed: under a millisecond where bf16 is native
ROUNDS = 5


def trained_dtype(config: Config, device: torch.device) -> torch.dtype:
    """`[model] dtype` on this device; ConfigError when bf16 is slower than fp32 there."""
    asked = config.table("model", ModelKeys).dtype
    dtype = DTYPES[AUTO_DTYPE.get(device.type, "bf16") if asked == "auto" else asked]
    if device.type == "cpu" and dtype == torch.bfloat16 and (why := bf16_refusal()):
        what, fix = "bf16 would be slower than fp32 on this CPU", 'set it to "fp32", or to "auto"'
        raise ConfigError(Problem(where=config.place("model.dtype"), what=what, why=why, fix=fix))
    return dtype


def bf16_refusal(seconds: Callable[[torch.dtype], float] | None = None) -> str | None:
    """Why bf16 does not pay on this CPU, by a product timed both ways; None where the CPU has instructions for it."""
    if seconds is None:
        if any(has() for has in _instructions()):
            return None
        seconds = product_s
    fp32_s, bf16_s = seconds(torch.float32), seconds(torch.bfloat16)
    if bf16_s < fp32_s:
        return None
    times = f"{1e3 * bf16_s:.2f} ms in bf16 and {1e3 * fp32_s:.2f} ms in fp32"
    return f"it emulates bf16: a product of {ROWS} x {WIDTH} x {WIDTH} takes {times}"


def product_s(dtype: torch.dtype) -> float:
    """Seconds of one product, the fastest of a few, which a busy machine disturbs least."""
    x, weight = torch.ones(ROWS, WIDTH, dtype=dtype), torch.ones(WIDTH, WIDTH, dtype=dtype)
    times = []
    with torch.no_grad():
        for _ in range(ROUNDS):
            started = time.perf_counter()
            functional.linear(x, weight)
            times.append(time.perf_counter() - started)
    return min(times)


def _instructions() -> list[Callable[[], bool]]:
    """What PyTorch can say about products of bf16 numbers: AVX-512 BF16 and AMX; other CPUs are measured."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return [has for name in names if (has := getattr(torch.cpu, name, None)) is not None]
