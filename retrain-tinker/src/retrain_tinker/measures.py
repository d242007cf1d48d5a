"""What an optimizer step did, computed from the log-probabilities that the service returned."""

from __future__ import annotations

import numpy as np

from retrain.api import Floats, TrainReport

MAX_LOG_RATIO = 20.0


def measured(*, loss: float, grad_norm: float | None, gaps_N: Floats, clipped: int) -> TrainReport:
    """The report of a step; `gaps_N` are log rho = logp_trainer - logp_sampler of every action token, in nats."""
    clamped_N = gaps_N.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratios_N, sizes_N = np.exp(clamped_N), np.abs(gaps_N)
    return TrainReport(
        loss=loss,
        grad_norm=grad_norm,
        num_tokens=len(gaps_N),
        ratio_mean=float(ratios_N.mean()),
        ratio_max=float(ratios_N.max()),
        gap_mean=float(sizes_N.mean()),
        gap_p99=float(np.percentile(sizes_N, 99)),
        gap_max=float(sizes_N.max()),
        k3=float((np.expm1(clamped_N) - clamped_N).mean()),
        ess_frac=float(ratios_N.sum() ** 2 / (len(ratios_N) * np.square(ratios_N).sum())),
        clip_fraction=clipped / len(gaps_N),
    )
