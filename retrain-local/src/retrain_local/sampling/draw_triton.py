"""`draw_tokens` in two Triton kernels that read the logits once, and one piece of them twice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrain_local.devices.kernel_trials import on_device_of
from retrain_local.sampling.draw import BELOW_ONE, DrawnTokens

PIECE = 4096  # logits that one program reads


def draw_tokens(logits_BV: Tensor, temperature: float | Tensor, uniforms_B: Tensor, *, entropy: bool) -> DrawnTokens:
    """Sample as `retrain_local.sampling.draw.draw_tokens` does, for logits of any dtype with dense rows."""
    rows, vocabulary = logits_BV.shape
    pieces = triton.cdiv(vocabulary, PIECE)
    if not isinstance(temperature, Tensor):
        temperature = torch.full((), temperature, dtype=torch.float32, device=logits_BV.device)
    found_3BC = logits_BV.new_empty(3, rows, pieces, dtype=torch.float32)
    tokens_B = logits_BV.new_empty(rows, dtype=torch.int64)
    # Two tensors: the second row of one would be aligned for some numbers of rows only.
    logprobs_B, entropies_B = (logits_BV.new_empty(rows, dtype=torch.float32) for _ in range(2))
    sizes = {"VOCABULARY": vocabulary, "PIECES": pieces, "PIECE": PIECE}
    with on_device_of(logits_BV):
        _measure[(rows, pieces)](logits_BV, temperature, found_3BC, logits_BV.stride(0), rows, **sizes, num_warps=8)
        given = logits_BV, temperature, found_3BC, uniforms_B, tokens_B, logprobs_B, entropies_B
        sizes |= {"TILE_PIECES": triton.next_power_of_2(pieces)}
        _choose[(rows,)](*given, logits_BV.stride(0), rows, **sizes, BELOW_ONE=BELOW_ONE, num_warps=8)
    return DrawnTokens(tokens_B=tokens_B, logprobs_B=logprobs_B, entropies_B=entropies_B if entropy else None)


@triton.jit  # type: ignore[untyped-decorator]
def _piece(logits, temperature, row, piece, logits_row, VOCABULARY: tl.constexpr, PIECE: tl.constexpr):  # type: ignore[no-untyped-def]
    # the numbers of a piece, -inf past the end
    at = piece * PIECE + tl.arange(0, PIECE)
    wide = tl.load(logits + row * logits_row + at, mask=at < VOCABULARY, other=float("-inf")).to(tl.float32)
    return wide / tl.load(temperature).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _measure(  # type: ignore[no-untyped-def]
    logits, temperature, found, logits_row, rows, VOCABULARY: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr
):
    # of a piece: its largest number m, sum of e = exp(x - m), and sum of e (x - m); m = 0 where all are -inf
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    x = _piece(logits, temperature, row, piece, logits_row, VOCABULARY, PIECE)
    top = tl.max(x, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    below = x - top
    e = tl.exp(below)
    place = row * PIECES + piece
    tl.store(found + place, top)
    tl.store(found + rows * PIECES + place, tl.sum(e, 0))
    # -inf has no share in the entropy
    tl.store(found + 2 * rows * PIECES + place, tl.sum(tl.where(below == float("-inf"), 0.0, e * below), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    logits,
    temperature,
    found,
    uniforms,
    tokens,
    logprobs,
    entropies,
    logits_row,
    rows,
    VOCABULARY: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    TILE_PIECES: tl.constexpr,
    BELOW_ONE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    pieces = tl.arange(0, TILE_PIECES)
    is_piece = pieces < PIECES
    place = row * PIECES + pieces
    tops = tl.load(found + place, mask=is_piece, other=0.0)
    sums = tl.load(found + rows * PIECES + place, mask=is_piece, other=0.0)
    slopes = tl.load(found + 2 * rows * PIECES + place, mask=is_piece, other=0.0)
    # a piece without a token that can be drawn must not be the largest: its 0 means -inf
    top = tl.max(tl.where(sums == 0.0, float("-inf"), tops), 0)
    shrink = tl.where(sums == 0.0, 0.0, tl.exp(tops - top))
    weights = (sums * shrink).to(tl.float64)
    total = tl.sum(sums * shrink, 0)
    normaliser = top + tl.log(total)
    mean = tl.sum(shrink * (slopes + sums * tops), 0) / total
    tl.store(entropies + row, normaliser - mean)

    uniform = tl.minimum(tl.maximum(tl.load(uniforms + row), 0.0), BELOW_ONE)
    chosen, into = _first_above(weights, pieces, uniform, TILE_PIECES)
    chosen = tl.minimum(chosen, PIECES - 1)
    x = _piece(logits, temperature, row, chosen, logits_row, VOCABULARY, PIECE)
    own_top = tl.max(x, 0)
    at = tl.arange(0, PIECE)
    token, _ = _first_above(tl.exp(x - own_top).to(tl.float64), at, into, PIECE)
    # past the end only where a NaN is among the weights
    token = tl.minimum(token, PIECE - 1)
    picked = tl.sum(tl.where(at == token, x, 0.0), 0)
    tl.store(tokens + row, tl.minimum(chosen.to(tl.int64) * PIECE + token, VOCABULARY - 1))
    tl.store(logprobs + row, picked - normaliser)


@triton.jit  # type: ignore[untyped-decorator]
def _first_above(weights, at, uniform, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    # The first of weight above 0 whose cumulative weight exceeds the uniform's share of the total, and how far into it.
    # A sum in another order than the running one may fall short of it or exceed it by a rounding.
    ends = tl.cumsum(weights, 0)
    is_able = weights > 0.0
    wanted = uniform * tl.max(ends, 0)
    index = tl.min(tl.where(is_able & (ends > wanted), at, SIZE), 0)
    last = tl.max(tl.where(is_able, at, 0), 0)
    index = tl.where(index == SIZE, last, index)
    weight = tl.sum(tl.where(at == index, weights, 0.0), 0)
    end = tl.sum(tl.where(at == index, ends, 0.0), 0)
    into = (wanted - (end - weight)) / weight
    return index, tl.minimum(tl.maximum(into, 0.0), 1.0 - 1e-15)
