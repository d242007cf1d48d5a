"""Attention over packed rows by flash attention: PyTorch's `varlen_attn`, CUDA and 16-bit numbers only."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrain_local.attention.packed import PaddedAttend, Picks, Spans
from retrain_local.decoder import Scores
from retrain_local.devices.torch_devices import deterministic

DTYPES = torch.float16, torch.bfloat16
LARGEST_HEAD = 256
BACKWARD_TAKES = ["grad_out", "query", "key", "value", "out", "lse", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
BACKWARD_TAKES += ["is_causal", "rng_state", "scale", "window_size"]


class Rows:
    """Packed rows of queries and of keys; the last query of a row is at the position of its last key."""

    def __init__(self, new_lengths: Sequence[int], key_lengths: Sequence[int], device: torch.device) -> None:
        self.query_ends = _ends(new_lengths, device)
        self.key_ends = _ends(key_lengths, device)
        # with one query per row the kernel stores the numbers for the backward pass in another order
        self.max_queries = max(2, *new_lengths)
        self.max_keys = max(2, *key_lengths)


class VarlenAttend:
    """`Attend` over the segments of one packed row; differentiable, and the same bits every time if `exact`.

    Layers that flash attention cannot compute (fp32, soft-capped scores, sinks) go through `PaddedAttend`. `exact`
    turns on PyTorch's process-wide deterministic mode in a backward call, so no other thread may use PyTorch.
    """

    def __init__(self, spans: Spans, device: torch.device, *, exact: bool = True) -> None:
        self._spans, self._device, self._exact = spans, device, exact
        self._padded: PaddedAttend | None = None
        before = [spans.lengths[prefix] if prefix >= 0 else 0 for prefix in spans.prefixes]
        keys = [own + prefix for own, prefix in zip(spans.lengths, before, strict=True)]
        self._rows = Rows(spans.lengths, keys, device)
        self._copies = _copies(spans, device) if any(before) else None

    def __call__(self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor, scores: Scores) -> Tensor:
        if not flash_computes(queries_NHD, values_NKD, scores):
            self._padded = self._padded or PaddedAttend(self._spans, self._device)
            return self._padded(layer, queries_NHD, keys_NKD, values_NKD, scores)
        if self._copies is not None:
            keys_NKD, values_NKD = self._copies.of(keys_NKD), self._copies.of(values_NKD)
        return attend_rows(queries_NHD, keys_NKD, values_NKD, self._rows, scores, exact=self._exact)


def refusal(device: torch.device) -> str | None:
    """Return why `varlen_attn` cannot be used on this device; None if it can."""
    if device.type != "cuda":
        return f"flash attention runs on CUDA, not on {device.type!r}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"flash attention needs compute capability 8.0, this GPU has {major}.{minor}"
    try:
        importlib.import_module("torch.nn.attention.varlen")
    except ImportError:
        return f"PyTorch {torch.__version__} has no torch.nn.attention.varlen"
    schema = torch.ops.torch_attn._varlen_attn_backward.default._schema
    if [argument.name for argument in schema.arguments][: len(BACKWARD_TAKES)] != BACKWARD_TAKES:
        return f"the backward pass of varlen_attn takes other arguments in PyTorch {torch.__version__}"
    return None


def flash_computes(queries_NHD: Tensor, values_NKD: Tensor, scores: Scores) -> bool:
    """True if flash attention supports the dtype, sizes and scores of a layer."""
    size = queries_NHD.shape[2]
    fits = size % 8 == 0 and size <= LARGEST_HEAD and size == values_NKD.shape[2]
    return fits and queries_NHD.dtype in DTYPES and scores.softcap is None and scores.sinks_H is None


def attend_rows(
    queries_NHD: Tensor, keys_MKD: Tensor, values_MKD: Tensor, rows: Rows, scores: Scores, *, exact: bool = True
) -> Tensor:
    """Return causal attention within each row, [N, heads, size], for layers that `flash_computes`."""
    # a window of w keys includes the query's own, so w - 1 keys to its left
    window = (-1 if scores.window is None else scores.window - 1, 0)
    return _Flash.apply(queries_NHD, keys_MKD, values_MKD, rows, scores.scale, window, exact)


@functools.cache
def _options() -> dict[str, Any]:
    # earlier versions of PyTorch infer grouped heads from the shapes
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


class _Flash(torch.autograd.Function):  # type: ignore[misc]
    """`varlen_attn` with a backward pass that can be made deterministic."""

    @staticmethod
    def forward(
        ctx: Any,
        queries_NHD: Tensor,
        keys_MKD: Tensor,
        values_MKD: Tensor,
        rows: Rows,
        scale: float,
        window: tuple[int, int],
        exact: bool,
    ) -> Tensor:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        lengths = rows.query_ends, rows.key_ends, rows.max_queries, rows.max_keys
        out_NHD, sums = varlen_attn(
            queries_NHD,
            keys_MKD,
            values_MKD,
            *lengths,
            return_aux=AuxRequest(lse=True),
            scale=scale,
            window_size=window,
            **_options(),
        )
        ctx.save_for_backward(queries_NHD, keys_MKD, values_MKD, out_NHD, sums)
        ctx.lengths, ctx.scale, ctx.window, ctx.exact = lengths, scale, window, exact
        return out_NHD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=gradient.device)
        with _deterministic(ctx.exact):
            into = torch.ops.torch_attn._varlen_attn_backward(
                gradient.contiguous(),
                *ctx.saved_tensors,
                *ctx.lengths,
                ctx.window == (-1, 0),
                no_dropout,
                ctx.scale,
                list(ctx.window),
            )
        return (*into, None, None, None, None)


def _deterministic(wanted: bool) -> AbstractContextManager[None]:
    # flash attention's backward pass sums in a fixed order in PyTorch's deterministic mode, unless that only warns
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if not wanted or (torch.are_deterministic_algorithms_enabled() and not warns):
        return nullcontext()
    return deterministic(warn_only=False)


def _copies(spans: Spans, device: torch.device) -> Picks:
    starts = spans.starts
    index: list[np.ndarray] = []
    for segment, prefix in enumerate(spans.prefixes):
        if prefix >= 0:
            index.append(np.arange(starts[prefix], starts[prefix + 1]))
        index.append(np.arange(starts[segment], starts[segment + 1]))
    return Picks(np.concatenate(index), spans.num_tokens, device)


def _ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    ends = list(itertools.accumulate(lengths, initial=0))
    return torch.tensor(ends, dtype=torch.int32).to(device)
