"""The share of an adapter's update that each rank retains, and the smallest rank that retains enough.

B A is never formed: B = Q_B R_B and A^T = Q_A R_A (thin QR), R_B R_A^T = U S V^T (rank x rank), so
B A = (Q_B U) S (Q_A V)^T. That is exact, not randomised (algorithm 2 of arXiv:2602.10993, whose randomised SVD is for
higher ranks).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits
from typing_extensions import override

from retrain.kernel.types import Floats
from retrain.tools.squeeze.adapter import Adapter, LoraPair, read_adapter, unusable

RETENTION = 0.95
BLOCK_ROWS = 1024
EPSILON = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSpectrum:
    """One module: the singular values of its update `scale * B A`, largest first, one per rank.

    `variance_R` is V(k) at k = 1 ... rank, None for a module that learned nothing. `rank_needed` is the smallest rank
    that keeps `min_variance_retention` of this module.
    """

    module: str
    rank: int
    alpha: float
    scale: float
    shape: tuple[int, int]
    singular_values_R: Floats
    variance_R: Floats | None
    rank_needed: int | None

    @property
    def norm(self) -> float:
        """Return the Frobenius norm of the update; its square is the update's energy."""
        return math.hypot(*self.singular_values_R)

    def as_data(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "rank": self.rank,
            "alpha": self.alpha,
            "scale": self.scale,
            "out": self.shape[0],
            "in": self.shape[1],
            "norm": self.norm,
            "rank_needed": self.rank_needed,
            "singular_values": self.singular_values_R.tolist(),
            "variance": None if self.variance_R is None else self.variance_R.tolist(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """V at one tested rank over all modules that learned something, each in [0, 1].

    `energy_variance` weighs each module by the energy of its update: the share of the whole update that is kept.
    """

    rank: int
    mean_variance: float
    min_variance: float
    max_variance: float
    energy_variance: float
    worst_module: str

    @property
    def percents(self) -> tuple[str, ...]:
        values = (self.mean_variance, self.min_variance, self.max_variance, self.energy_variance)
        return tuple(f"{100 * value:.2f}" for value in values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SqueezeAnalysis:
    """The analysis; `recommended_rank` is None if no tested rank retains enough, or nothing was learned.

    The rule (unweighted mean over modules) looks at spectra only: it says nothing about rewards.
    """

    adapter: Path
    source_rank: int
    min_variance_retention: float
    layers: tuple[LayerSpectrum, ...]
    rows: tuple[RankRow, ...]
    recommended_rank: int | None

    @property
    def num_without_update(self) -> int:
        """Return the number of modules whose update is zero; the means leave them out."""
        return sum(layer.variance_R is None for layer in self.layers)

    @property
    def learned_nothing(self) -> bool:
        return self.num_without_update == len(self.layers)

    def as_data(self, *, layers: bool = False) -> dict[str, Any]:
        data: dict[str, Any] = {
            "adapter": str(self.adapter),
            "source_rank": self.source_rank,
            "recommended_rank": self.recommended_rank,
            "min_variance_retention": self.min_variance_retention,
            "num_layers": len(self.layers),
            "num_layers_without_update": self.num_without_update,
            "ranks": [asdict(row) | {"recommended": row.rank == self.recommended_rank} for row in self.rows],
        }
        if layers:
            data["layers"] = [layer.as_data() for layer in self.layers]
        return data


def analyze_adapter(
    path: Path | str,
    *,
    target_ranks: Sequence[int] = (),
    min_variance_retention: float = RETENTION,
    source_rank: int = 0,
    device: str = "cpu",
) -> SqueezeAnalysis:
    """Return the spectrum of every module of a PEFT adapter, and the rank that its update needs.

    `target_ranks` are tested, each at most the adapter's; by default 1, 2, 4, ... and the adapter's. The recommended
    rank is the smallest tested one whose V, averaged over modules without weights, reaches `min_variance_retention`
    (0 to 1); where modules differ in rank, V is 1 from a module's full rank on. `source_rank` is the rank expected of
    the adapter (0: any). One module is in memory at a time. ConfigError for an adapter that cannot be read. V and the
    factorisation follow arXiv:2602.10993; choosing a rank by V does not.
    """
    if not 0.0 < min_variance_retention <= 1.0:
        what, fix = f"{min_variance_retention} is not a share", "give 0 < x <= 1"
        raise unusable("min_variance_retention", code="squeeze.bad-share", what=what, fix=fix)
    adapter = read_adapter(path)
    if source_rank and source_rank != adapter.rank:
        what = f"the adapter has rank {adapter.rank}, [squeeze] source_rank says {source_rank}"
        fix = "set source_rank = 0, or give the intended adapter"
        raise unusable(adapter.folder, code="squeeze.source-rank", what=what, fix=fix)
    ranks = ranks_to_test(adapter.rank, target_ranks)
    solver = solver_for(device)
    with one_thread():
        layers = tuple(_spectrum(adapter, pair, solver, min_variance_retention) for pair in adapter.pairs)
    rows = tuple(_row(rank, layers) for rank in ranks) if any(layer.variance_R is not None for layer in layers) else ()
    enough = (row.rank for row in rows if row.mean_variance >= min_variance_retention)
    return SqueezeAnalysis(
        adapter=adapter.folder,
        source_rank=adapter.rank,
        min_variance_retention=min_variance_retention,
        layers=layers,
        rows=rows,
        recommended_rank=next(enough, None),
    )


def ranks_to_test(source_rank: int, wanted: Sequence[int] = ()) -> list[int]:
    """Return the ranks to test, ascending: powers of two up to `source_rank` and itself, or `wanted`, clamped to it."""
    if any(rank < 1 for rank in wanted):
        what, fix = f"{min(wanted)} is not a rank", "give whole numbers from 1"
        raise unusable("target_ranks", code="squeeze.bad-rank", what=what, fix=fix)
    powers = [2**i for i in range(source_rank.bit_length())]
    return sorted({min(rank, source_rank) for rank in wanted or [*powers, source_rank]})


def _spectrum(adapter: Adapter, pair: LoraPair, solver: Solver, retention: float) -> LayerSpectrum:
    a, b = adapter.factors(pair)
    with np.errstate(over="ignore", invalid="ignore"):
        s = abs(pair.scale) * solver.singular_values(a, b)
        is_measurable = bool(np.isfinite(np.square(s).sum()))
    if not is_measurable:
        what = f"the update of {pair.module} is too large to be measured: alpha is {pair.alpha:g}"
        fix = "restore the lora_alpha of its training"
        raise unusable(adapter.config.path, code="squeeze.update-too-large", what=what, fix=fix)
    kept = variance_kept(s) if s.any() else None
    return LayerSpectrum(
        module=pair.module,
        rank=pair.rank,
        alpha=pair.alpha,
        scale=pair.scale,
        shape=(b.shape[0], a.shape[1]),
        singular_values_R=s,
        variance_R=kept,
        rank_needed=None if kept is None else int(np.argmax(kept >= retention)) + 1,
    )


def _row(rank: int, layers: Sequence[LayerSpectrum]) -> RankRow:
    # From its own rank on, a layer keeps all.
    learned = [
        (each, float(each.variance_R[min(rank, each.rank) - 1])) for each in layers if each.variance_R is not None
    ]
    values = [value for _, value in learned]
    largest = max(layer.norm for layer, _ in learned)
    # Relative to the largest, so that no square overflows; the common factor cancels in the mean.
    weights = [(layer.norm / largest) ** 2 for layer, _ in learned]
    worst, lowest = min(learned, key=lambda pair: pair[1])
    return RankRow(
        rank=rank,
        mean_variance=math.fsum(values) / len(values),
        min_variance=lowest,
        max_variance=max(values),
        energy_variance=min(1.0, math.fsum(map(math.prod, zip(weights, values, strict=True))) / math.fsum(weights)),
        worst_module=worst.module,
    )


# The decomposition of B A.


class Solver:
    """The decomposition on the CPU, in float64."""

    def singular_values(self, a: Floats, b: Floats) -> Floats:
        """Return the singular values of B A, largest first, one per rank: A is (rank, in), B (out, rank)."""
        core = self._triangle(b) @ self._triangle(a.T).T
        return _cleaned(self._svd(core)[1], a, b)

    def truncate(self, a: Floats, b: Floats, rank: int) -> tuple[Floats, Floats, Floats]:
        """Return A' (rank, in) and B' (out, rank) of the best B' A', of equal norms; and all singular values."""
        q_b, r_b = self._qr(b)
        q_a, r_a = self._qr(a.T)
        u, s, vt = self._svd(r_b @ r_a.T)
        kept = min(rank, len(s))
        roots = np.sqrt(s[:kept])
        small_a, small_b = roots[:, None] * (vt[:kept] @ q_a.T), (q_b @ u[:, :kept]) * roots
        # A module narrower than the rank is padded with zeros: the product is unchanged.
        missing = rank - kept
        padded = np.pad(small_a, ((0, missing), (0, 0))), np.pad(small_b, ((0, 0), (0, missing)))
        return *padded, _cleaned(s, a, b)

    def _triangle(self, matrix: Floats) -> Floats:
        """Return R of the thin QR, by blocks of rows that fit the cache, in half the time.

        Each block's R is stacked and factored again (tall-skinny QR, arXiv:0808.2664).
        """
        blocks: list[Any] = [np.linalg.qr(block, mode="r") for block in _blocks(matrix)]
        return self._triangle(np.concatenate(blocks)) if len(blocks) > 1 else np.asarray(blocks[0])

    def _qr(self, matrix: Floats) -> tuple[Floats, Floats]:
        """Return Q and R of the thin QR, computed in the same way."""
        parts = [np.linalg.qr(block) for block in _blocks(matrix)]
        if len(parts) == 1:
            return parts[0].Q, parts[0].R
        inner_q, r = self._qr(np.concatenate([part.R for part in parts]))
        ends = np.cumsum([len(part.R) for part in parts])[:-1]
        q_blocks = [part.Q @ inner for part, inner in zip(parts, np.split(inner_q, ends), strict=True)]
        return np.concatenate(q_blocks), r

    def _svd(self, core: Floats) -> tuple[Floats, Floats, Floats]:
        u, s, vt = np.linalg.svd(core, full_matrices=False)
        return u, s, vt


class TorchSolver(Solver):
    """The decomposition on a torch device, in float64, or float32 on Apple's; the only use of torch in core."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch: Any = torch
        name = device.replace("gpu", "cuda")  # `gpu:0`, as in [backend] devices
        try:
            self._device = torch.device(name)
            self._dtype = torch.float32 if self._device.type == "mps" else torch.float64
            torch.zeros(1, device=self._device, dtype=self._dtype)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            what, fix = f"{device!r} cannot be used: {str(error).splitlines()[0]}", 'set device = "cpu"'
            raise unusable("[squeeze] device", code="squeeze.bad-device", what=what, fix=fix) from error

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
    """Return singular values, one per rank; 0 for those beyond the matrix's shape and for rounding noise."""
    # The usual tolerance of a numerical rank, of the product's norm by its bound |A| |B|.
    rank = len(a)
    noise = EPSILON * rank * float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    full = np.zeros(rank)
    full[: len(s)] = np.where(s > noise, s, 0.0)
    return full


def _blocks(matrix: Floats) -> list[Floats]:
    """Return blocks of rows, at least four times as tall as wide, so that stacked triangles shrink the matrix."""
    return np.array_split(matrix, max(1, len(matrix) // max(BLOCK_ROWS, 4 * matrix.shape[1])))


def one_thread() -> threadpool_limits:
    """Limit numpy's linear algebra to this thread within a block.

    The matrices are too small for more: on two busy cores, two threads that wait for each other take ten times as long.
    """
    return threadpool_limits(limits=1, user_api="blas")


def solver_for(device: str) -> Solver:
    return Solver() if device == "cpu" else TorchSolver(device)


def variance_kept(s: Floats) -> Floats:
    """Return V(k) = sum_{i<=k} s_i^2 / sum s_i^2 for k = 1 ... rank; increasing, the last one exactly 1.

    `s` must not be all zero: V is undefined for a module that learned nothing.
    """
    # Scaled first: the squares of very small singular values would be zero, of very large ones infinite.
    energy = np.cumsum(np.square(s / s.max()))
    kept: Floats = energy / energy[-1]
    return kept
