"""How much of an adapter's update each rank retains, module by module, and the smallest rank that retains enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrain.kernel.types import Floats
from retrain.tools.squeeze.adapter import Adapter, LoraPair, read_adapter
from retrain.tools.squeeze.spectrum import Solver, one_thread, solver_for, variance_kept
from retrain.tools.squeeze.tensor_file import unusable

RETENTION = 0.95


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSpectrum:
    """One module: the singular values of its update `scale * B A`, largest first, one per rank.

    `variance_R` is V(k) at k = 1 ... rank, None for a module that learned nothing. `rank_needed` is the smallest rank
    that keeps `min_variance_retention` of this module alone.
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
        """Frobenius norm of the update; its square is the update's energy."""
        return math.hypot(*self.singular_values_R)

    def variance_at(self, rank: int) -> float | None:
        """V(rank); 1 from the module's own rank on."""
        return None if self.variance_R is None else float(self.variance_R[min(rank, self.rank) - 1])

    def as_data(self) -> dict[str, Any]:
        """Plain data."""
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
        """Mean, least, largest and energy-weighted variance as percents with two digits."""
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
        """Modules whose update is zero; the means leave them out."""
        return sum(layer.variance_R is None for layer in self.layers)

    @property
    def learned_nothing(self) -> bool:
        """Whether the whole adapter has no effect."""
        return self.num_without_update == len(self.layers)

    def as_data(self, *, layers: bool = False) -> dict[str, Any]:
        """Plain data for a manifest; with `layers` every module's spectrum too."""
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
    """Spectrum of every module of a PEFT adapter, and the rank that its update needs.

    `target_ranks` are tested, at most the adapter's own rank each; empty tests 1, 2, 4, ... and the own rank. The
    recommended rank is the smallest tested one whose V, averaged over modules without weights, reaches
    `min_variance_retention` (0 to 1); where modules differ in rank, V is 1 from a module's own rank on. `source_rank`
    is what the adapter's rank is expected to be (0: anything). One module is in memory at a time. ConfigError for an
    adapter that cannot be read. V and the factorisation are those of arXiv:2602.10993; choosing a rank by V is ours.
    """
    if not 0.0 < min_variance_retention <= 1.0:
        raise unusable("min_variance_retention", f"{min_variance_retention} is not a share", fix="give 0 < x <= 1")
    adapter = read_adapter(path)
    if source_rank and source_rank != adapter.rank:
        what = f"the adapter has rank {adapter.rank}, [squeeze] source_rank says {source_rank}"
        raise unusable(adapter.folder, what, fix="set source_rank = 0, or give the intended adapter")
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
    """The ranks to test, ascending: powers of two up to `source_rank` and itself, or `wanted`, clamped to it."""
    if any(rank < 1 for rank in wanted):
        raise unusable("target_ranks", f"{min(wanted)} is not a rank", fix="give whole numbers from 1")
    powers = [2**i for i in range(source_rank.bit_length())]
    return sorted({min(rank, source_rank) for rank in wanted or [*powers, source_rank]})


def _spectrum(adapter: Adapter, pair: LoraPair, solver: Solver, retention: float) -> LayerSpectrum:
    a, b = adapter.factors(pair)
    with np.errstate(over="ignore", invalid="ignore"):
        s = abs(pair.scale) * solver.singular_values(a, b)
        is_measurable = bool(np.isfinite(np.square(s).sum()))
    if not is_measurable:
        what = f"the update of {pair.module} is too large to be measured: alpha is {pair.alpha:g}"
        raise unusable(adapter.config.path, what, fix="restore the lora_alpha of its training")
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
    learned = [(layer, value) for layer in layers if (value := layer.variance_at(rank)) is not None]
    values = [value for _, value in learned]
    largest = max(layer.norm for layer, _ in learned)
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
