"""`PagedKernels` in plain PyTorch, row by row: the slow reference for the fast kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from retrain_local.attention.padded import dense_attention
from retrain_local.attention.pages import LARGEST, as_bytes
from retrain_local.decoder import Scores


class PlainPages:
    """Computes in fp32 and synchronises with the device."""

    def write(
        self,
        keys_NKD: Tensor,
        values_NKD: Tensor,
        keys: Tensor,
        values: Tensor,
        slots_N: Tensor,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> None:
        """See `PagedKernels`."""
        for new, pool, scales in ((keys_NKD, keys, key_scales), (values_NKD, values, value_scales)):
            cells = new
            if scales is not None:
                scales_NK = new.float().abs().amax(-1) / LARGEST[pool.dtype]
                scales_NK = torch.where(scales_NK == 0, 1.0, scales_NK)
                scales.flatten(0, 1)[slots_N] = scales_NK
                cells = new.float() / scales_NK[..., None]
                cells = cells.round() if pool.dtype is torch.int8 else cells
            as_bytes(pool).flatten(0, 1)[slots_N] = as_bytes(cells.to(pool.dtype))

    def read(
        self,
        queries_BHD: Tensor,
        keys: Tensor,
        values: Tensor,
        tables_BM: Tensor,
        lengths_B: Tensor,
        scores: Scores,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> Tensor:
        """See `PagedKernels`."""
        sides = (keys, key_scales), (values, value_scales)
        most = tables_BM.shape[1] * keys.shape[1]
        gathered = []
        for queries_HD, table_M, length in zip(queries_BHD.float(), tables_BM.long(), lengths_B.tolist(), strict=True):
            length = min(length, most)
            if length == 0:
                gathered.append(queries_HD.new_zeros(len(queries_HD), values.shape[-1]))
                continue
            first = max(0, length - (scores.window or length))
            seen_keys, seen_values = (
                _numbers(pool, scales, table_M).flatten(0, 1)[first:length].transpose(0, 1)[None]
                for pool, scales in sides
            )
            gathered.append(dense_attention(queries_HD[None, :, None], seen_keys, seen_values, None, scores)[0, :, 0])
        return torch.stack(gathered).to(queries_BHD.dtype)


def _numbers(pool: Tensor, scales: Tensor | None, blocks: Tensor) -> Tensor:
    cells = as_bytes(pool)[blocks].view(pool.dtype).float()
    return cells if scales is None else cells * scales[blocks][..., None]
