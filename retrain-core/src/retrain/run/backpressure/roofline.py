"""The roofline of decoding: whether memory or arithmetic limits it, and the name of a run's regime."""

from __future__ import annotations

from dataclasses import dataclass

WARMUP = "warmup"
UNKNOWN = "unknown"
RETROGRADE = "retrograde"
MEMORY_BOUND = "memory_bound"
COMPUTE_BOUND = "compute_bound"
OPTIMAL = "optimal"
UNDERUSED = "underused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Peak arithmetic in GFLOP/s and peak memory bandwidth in GB/s of one device, both above 0.

    Decoding with bf16 weights reads 2 bytes per weight and does 2 operations with it for every completion in the batch:
    its arithmetic intensity, in FLOP per byte, is the number of concurrent completions (arXiv:2402.16363).
    """

    peak_gflops: float
    peak_bw_gb_s: float

    @property
    def ridge(self) -> float:
        """Intensity, that is concurrent completions, from which on arithmetic is the limit: peak / bandwidth."""
        return self.peak_gflops / self.peak_bw_gb_s

    def attainable_gflops(self, intensity: float) -> float:
        """min(peak, intensity x bandwidth)."""
        return min(self.peak_gflops, intensity * self.peak_bw_gb_s)

    def bound(self, p: float) -> str:
        """`memory_bound` below the ridge, `compute_bound` from it on."""
        return MEMORY_BOUND if p < self.ridge else COMPUTE_BOUND


def regime(p: float, p_star: float, *, underused_below: float, roofline: Roofline | None) -> str:
    """The regime of p concurrent completions: past the peak, else by the roofline, else whether more would help."""
    if p > p_star:
        return RETROGRADE
    if roofline is not None:
        return roofline.bound(p)
    return UNDERUSED if p < underused_below else OPTIMAL
