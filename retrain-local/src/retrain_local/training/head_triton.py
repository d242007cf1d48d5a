"""Log-probabilities of a chunk of logits and their slope in one Triton kernel. Imported only for CUDA.

A program reads its row twice and writes the slope once: 6 bytes for each logit in bf16, not some 40.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrain_local.devices.kernel_trials import dense, on_device_of

TILE = 4096  # logits of a row that are worked on at a time
# Below every finite logit, and finite: a tile of -inf adds 0, not NaN.
FLOOR = tl.constexpr(-3.0e38)


def triton_softmax(logits_MV: Tensor, tokens_M: Tensor, temperature: float, slope: bool) -> tuple[Tensor, Tensor]:
    rows, vocabulary = logits_MV.shape
    logits_MV = dense(logits_MV)
    logprobs_M = torch.empty(rows, dtype=torch.float32, device=logits_MV.device)
    slope_MV = logits_MV.new_empty(rows, vocabulary) if slope else logits_MV
    tile = min(TILE, triton.next_power_of_2(vocabulary))
    with on_device_of(logits_MV):
        given = logits_MV, tokens_M, logprobs_M, slope_MV, logits_MV.stride(0), 1.0 / temperature
        _softmax[(rows,)](*given, VOCABULARY=vocabulary, TILE=tile, SLOPE=slope, num_warps=8)
    return logprobs_M, slope_MV


@triton.jit  # type: ignore[untyped-decorator]
def _softmax(  # type: ignore[no-untyped-def]
    logits,
    tokens,
    logprobs,
    slope,
    row_stride,
    factor,
    VOCABULARY: tl.constexpr,
    TILE: tl.constexpr,
    SLOPE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * row_stride
    most = FLOOR + 0.0 * factor
    total = 0.0 * factor
    for start in range(0, VOCABULARY, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(source + at, mask=at < VOCABULARY, other=-float("inf")).to(tl.float32) * factor
        higher = tl.maximum(most, tl.max(x, 0))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(x - higher), 0)
        most = higher
    normalizer = most + tl.log(total)
    token = tl.load(tokens + row)
    chosen = tl.load(source + token).to(tl.float32) * factor
    tl.store(logprobs + row, chosen - normalizer)
    if SLOPE:
        target = slope + row * VOCABULARY
        for start in range(0, VOCABULARY, TILE):
            at = start + tl.arange(0, TILE)
            inside = at < VOCABULARY
            x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32) * factor
            gain = tl.where(at == token, 1.0, 0.0) - tl.exp(x - normalizer)
            tl.store(target + at, (gain * factor).to(slope.dtype.element_ty), mask=inside)
