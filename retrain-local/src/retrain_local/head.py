"""Logits at chosen positions only, through the model's own forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class LogitsAt:
    """Calls a causal language model so that its head sees only the hidden states of chosen positions.

    Full logits of a batch, [rows, length, vocabulary], are by far the largest tensor of a training step, and most of
    it (prompts, padding) would be thrown away. A hook in front of the output embedding picks the wanted hidden
    states; whatever the architecture does behind its head (soft-capping, scaling) still happens, on the picked ones.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._positions: tuple[Tensor, Tensor] | None = None
        model.get_output_embeddings().register_forward_pre_hook(self._pick)

    def __call__(self, rows_N: Tensor, columns_N: Tensor, **inputs: Any) -> Tensor:
        """Logits [N, vocabulary] at (rows_N, columns_N) of `inputs`."""
        self._positions = (rows_N, columns_N)
        try:
            logits: Tensor = self._model(**inputs, return_dict=True).logits
        finally:
            self._positions = None
        return logits[0]

    def _pick(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self._positions is None:
            return None
        rows_N, columns_N = self._positions
        return (arguments[0][rows_N, columns_N].unsqueeze(0), *arguments[1:])


def last_positions(lengths_B: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of the last token of each right-padded row."""
    return torch.arange(len(lengths_B), device=lengths_B.device), lengths_B - 1
