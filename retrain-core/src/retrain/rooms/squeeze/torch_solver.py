"""The decomposition on a GPU; the only place in this distribution that imports torch."""

from __future__ import annotations

import numpy as np
import torch

from retrain.kernel.types import Floats
from retrain.rooms.squeeze.factors import cleaned, padded
from retrain.rooms.squeeze.faults import unusable


class TorchSolver:
    """On a torch device: float64, or float32 where the device has no other (Apple's)."""

    def __init__(self, device: str) -> None:
        name = device.replace("gpu", "cuda")  # `gpu:0`, as in [backend] devices
        try:
            self._device = torch.device(name)
            self._dtype = torch.float32 if self._device.type == "mps" else torch.float64
            torch.zeros(1, device=self._device, dtype=self._dtype)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise unusable("[squeeze] device", f"{device!r} cannot be used: {reason}", fix='device = "cpu"') from error

    def singular_values(self, a: Floats, b: Floats) -> Floats:
        """As `Solver`."""
        _, r_b = torch.linalg.qr(self._to(b), mode="r")
        _, r_a = torch.linalg.qr(self._to(a.T), mode="r")
        return cleaned(self._back(torch.linalg.svdvals(r_b @ r_a.T)), a, b)

    def truncate(self, a: Floats, b: Floats, rank: int) -> tuple[Floats, Floats, Floats]:
        """As `Solver`."""
        q_b, r_b = torch.linalg.qr(self._to(b))
        q_a, r_a = torch.linalg.qr(self._to(a.T))
        u, s, vt = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
        kept = min(rank, len(s))
        roots = s[:kept].sqrt()
        small_a, small_b = roots[:, None] * (vt[:kept] @ q_a.T), (q_b @ u[:, :kept]) * roots
        return *padded(self._back(small_a), self._back(small_b), rank), cleaned(self._back(s), a, b)

    def _to(self, values: Floats) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._dtype).to(self._device)

    def _back(self, tensor: torch.Tensor) -> Floats:
        values: Floats = tensor.cpu().double().numpy()
        return values
