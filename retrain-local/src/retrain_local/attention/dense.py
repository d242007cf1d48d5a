"""Attention with every score written out: for what PyTorch's own kernels lack (soft-capped scores, sinks)."""

from __future__ import annotations

import torch
from torch import Tensor

from retrain_local.decoder import Scores


def dense_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """softmax(softcap(scale q k^T) + mask) v, with a sink in the denominator where `scores` has one.

    `queries` [rows, heads, length, size], `keys` and `values` [rows, kv_heads, keys, size]; `mask` is added to the
    scores and broadcasts to [rows, 1, length, keys]. Weights are made in fp32, as transformers makes them.
    """
    rows, heads, length, size = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.reshape(rows, kv_heads, heads // kv_heads * length, size)
    weights = (grouped @ keys.transpose(2, 3) * scores.scale).view(rows, heads, length, -1)
    if scores.softcap is not None:
        weights = scores.softcap * torch.tanh(weights / scores.softcap)
    if mask is not None:
        weights = weights + mask
    weights = weights.float()
    if scores.sinks_H is not None:
        sinks = scores.sinks_H.float().view(1, heads, 1, 1).expand(rows, heads, length, 1)
        weights = torch.softmax(torch.cat([weights, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(weights, dim=-1)
    weights = weights.to(values.dtype).view(rows, kv_heads, heads // kv_heads * length, -1)
    return (weights @ values).view(rows, heads, length, values.shape[-1])
