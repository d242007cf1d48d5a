"""Singular values of B A and its best approximation of a smaller rank, without ever forming B A.

B = Q_B R_B and A^T = Q_A R_A (thin QR), R_B R_A^T = U S V^T (rank x rank), so B A = (Q_B U) S (Q_A V)^T: exact, not
randomised (algorithm 2 of arXiv:2602.10993, whose randomised SVD is for ranks above ours).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits
from typing_extensions import override

from retrain.kernel.types import Floats
from retrain.tools.squeeze.tensor_file import unusable

BLOCK_ROWS = 1024
EPSILON = float(np.finfo(np.float64).eps)


class Solver:
    """The decomposition on the CPU, in float64."""

    def singular_values(self, a: Floats, b: Floats) -> Floats:
        """The singular values of B A, largest first, one per rank: A is (rank, in), B (out, rank)."""
        core = self._triangle(b) @ self._triangle(a.T).T
        return _cleaned(self._svd(core)[1], a, b)

    def truncate(self, a: Floats, b: Floats, rank: int) -> tuple[Floats, Floats, Floats]:
        """A' (rank, in) and B' (out, rank) of the best approximation B' A', of equal norms; and all singular values."""
        q_b, r_b = self._qr(b)
        q_a, r_a = self._qr(a.T)
        u, s, vt = self._svd(r_b @ r_a.T)
        kept = min(rank, len(s))
        roots = np.sqrt(s[:kept])
        small_a, small_b = roots[:, None] * (vt[:kept] @ q_a.T), (q_b @ u[:, :kept]) * roots
        missing = rank - kept  # of a module that is narrower than the rank
        padded = np.pad(small_a, ((0, missing), (0, 0))), np.pad(small_b, ((0, 0), (0, missing)))
        return *padded, _cleaned(s, a, b)

    def _triangle(self, matrix: Floats) -> Floats:
        return _triangle(matrix)

    def _qr(self, matrix: Floats) -> tuple[Floats, Floats]:
        return _thin_qr(matrix)

    def _svd(self, core: Floats) -> tuple[Floats, Floats, Floats]:
        u, s, vt = np.linalg.svd(core, full_matrices=False)
        return u, s, vt


class TorchSolver(Solver):
    """On a torch device, float64 or, where it has no other (Apple's), float32; the one part of core that uses torch."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch: Any = torch
        name = device.replace("gpu", "cuda")  # `gpu:0`, as in [backend] devices
        try:
            self._device = torch.device(name)
            self._dtype = torch.float32 if self._device.type == "mps" else torch.float64
            torch.zeros(1, device=self._device, dtype=self._dtype)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise unusable("[squeeze] device", f"{device!r} cannot be used: {reason}", fix='device = "cpu"') from error

    @override
    def _triangle(self, matrix: Floats) -> Floats:
        return self._back(self._torch.linalg.qr(self._to(matrix), mode="r"))[1]

    @override
    def _qr(self, matrix: Floats) -> tuple[Floats, Floats]:
        q, r = self._back(self._torch.linalg.qr(self._to(matrix)))
        return q, r

    @override
    def _svd(self, core: Floats) -> tuple[Floats, Floats, Floats]:
        u, s, vt = self._back(self._torch.linalg.svd(self._to(core), full_matrices=False))
        return u, s, vt

    def _to(self, values: Floats) -> Any:
        return self._torch.from_numpy(np.ascontiguousarray(values)).to(self._dtype).to(self._device)

    def _back(self, tensors: Any) -> list[Floats]:
        return [tensor.cpu().double().numpy() for tensor in tensors]


def _cleaned(s: Floats, a: Floats, b: Floats) -> Floats:
    """Singular values, one per rank; 0 for those beyond the matrix's shape and for rounding noise."""
    rank = len(a)
    noise = EPSILON * rank * float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    full = np.zeros(rank)
    full[: len(s)] = np.where(s > noise, s, 0.0)
    return full


def _triangle(matrix: Floats) -> Floats:
    """R of the thin QR, computed by blocks of rows: a tall matrix does not fit the cache, and blocks halve the time.

    Each block's R is stacked and factored again (tall-skinny QR, arXiv:0808.2664).
    """
    blocks: list[Any] = [np.linalg.qr(block, mode="r") for block in _blocks(matrix)]
    return _triangle(np.concatenate(blocks)) if len(blocks) > 1 else np.asarray(blocks[0])


def _thin_qr(matrix: Floats) -> tuple[Floats, Floats]:
    """Q and R of the thin QR, computed in the same way."""
    parts = [np.linalg.qr(block) for block in _blocks(matrix)]
    if len(parts) == 1:
        return parts[0].Q, parts[0].R
    inner_q, r = _thin_qr(np.concatenate([part.R for part in parts]))
    ends = np.cumsum([len(part.R) for part in parts])[:-1]
    q_blocks = [part.Q @ inner for part, inner in zip(parts, np.split(inner_q, ends), strict=True)]
    return np.concatenate(q_blocks), r


def _blocks(matrix: Floats) -> list[Floats]:
    """Blocks of rows, each at least four times as tall as wide, so that stacking their triangles shrinks the matrix."""
    return np.array_split(matrix, max(1, len(matrix) // max(BLOCK_ROWS, 4 * matrix.shape[1])))


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit numpy's linear algebra to this thread within the block.

    The matrices are too small for more: on two busy cores, two threads that wait for each other take ten times as long.
    """
    with threadpool_limits(limits=1, user_api="blas"):
        yield


def solver_for(device: str) -> Solver:
    """The solver of a device: numpy for `cpu`, torch (imported on demand) for any other."""
    return Solver() if device == "cpu" else TorchSolver(device)


def variance_kept(s: Floats) -> Floats:
    """V(k) = sum_{i<=k} s_i^2 / sum s_i^2 for k = 1 ... rank; increasing, the last one exactly 1.

    `s` must not be all zero: V is undefined for a module that learned nothing.
    """
    energy = np.cumsum(np.square(s / s.max()))
    kept: Floats = energy / energy[-1]
    return kept
