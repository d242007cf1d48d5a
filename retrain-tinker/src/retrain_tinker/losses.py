"""The policy losses as the service computes them, for its requests and to check its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retrain.api import Config, Floats, Mask

LIKELIHOOD, CROSS_ENTROPY = "likelihood", "cross_entropy"
MAX_LOG_RATIO = 20.0
CLIP_EPS, CISPO_WEIGHT = 0.2, 4.0  # where [algorithm] says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """`[algorithm] loss` and its parameters: bounds of the ratio (ppo, cispo), and of the importance weight.

    That is the ratio of trainer before the step and sampler, by `is_level`; without `is_bounds` there is none.
    """

    kind: str = "importance_sampling"
    low: float = 0.8
    high: float = 1.2
    is_bounds: tuple[float, float] | None = None
    is_level: str = "token"
    is_mode: str = "truncate"
    aggregation: str = "token_mean"
    max_tokens: int = 1

    @classmethod
    def of(cls, config: Config) -> PolicyLoss:
        """The loss of `[algorithm]`; cispo bounds its weight only from above."""
        algorithm, is_cispo = config.algorithm, config.algorithm.loss == "cispo"
        eps, cap = algorithm.clip_eps or CLIP_EPS, algorithm.tis_cap
        bounds = list[float](config.algorithm.is_bounds) or ([0.0, cap] if cap > 0.0 else [])
        return cls(
            kind=algorithm.loss,
            low=0.0 if is_cispo else 1.0 - eps,
            high=algorithm.clip_eps_high or CISPO_WEIGHT if is_cispo else 1.0 + (algorithm.clip_eps_high or eps),
            is_bounds=(bounds[0], bounds[1]) if bounds else None,
            is_level=config.algorithm.is_level,
            is_mode=config.algorithm.is_mode,
            aggregation=config.algorithm.aggregation or "token_mean",
            max_tokens=config.training.max_tokens,
        )

    @property
    def service_config(self) -> dict[str, float] | None:
        if self.kind not in ("ppo", "cispo"):
            return None
        return {"clip_low_threshold": self.low, "clip_high_threshold": self.high}

    def terms(self, new_N: Floats, reference_N: Floats, advantages_N: Floats) -> tuple[Floats, Mask]:
        """Loss of each token and whether it was clipped, with rho = exp(new - reference).

        `reference` are the behaviour log-probabilities or, with a weight, the trainer's own before the step.

        importance_sampling: -rho A; ppo: -min(rho A, clip(rho, low, high) A); cispo: -clip(rho, low, high) A new;
        likelihood and its name on the service, cross_entropy: -A new.
        Each is proportional to A, through which `retrain_tinker.datums` turns sums into means over tokens.
        """
        ratios_N = np.exp(new_N - reference_N)
        bounded_N = ratios_N.clip(self.low, self.high)
        plain_N = ratios_N * advantages_N
        if self.kind == "ppo":
            kept_N = np.minimum(plain_N, bounded_N * advantages_N)
            return -kept_N, kept_N < plain_N
        if self.kind == "cispo":
            return -bounded_N * advantages_N * new_N, bounded_N != ratios_N
        if self.kind in (LIKELIHOOD, CROSS_ENTROPY):
            plain_N = advantages_N * new_N
        return -plain_N, np.zeros(len(ratios_N), dtype=np.bool_)

    def importance(self, new_N: Floats, behaviour_N: Floats) -> tuple[Floats, Mask]:
        """Weight of each token of a row, 1 where weights are off, and whether it was outside the bounds."""
        if self.is_bounds is None:
            return np.ones(len(new_N)), np.zeros(len(new_N), dtype=np.bool_)
        low, high = self.is_bounds
        logs_N = new_N - behaviour_N
        if self.is_level != "token":
            logs_N = np.full(len(logs_N), logs_N.sum() if self.is_level == "sequence" else logs_N.mean())
        ratios_N = np.exp(logs_N.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))
        outside_N = (ratios_N < low) | (ratios_N > high)
        weights_N = np.where(outside_N, 0.0, ratios_N) if self.is_mode == "mask" else ratios_N.clip(low, high)
        return weights_N, outside_N

    def denominators(self, counts: Sequence[int], num_masked: int) -> list[int]:
        """By what the sum of each row's terms is divided, for rows of these numbers of action tokens.

        Rows without any are no sequences; masked ones count where the loss is divided by sequences.
        """
        if self.aggregation == "token_mean":
            return [sum(counts)] * len(counts)
        sequences = sum(count > 0 for count in counts) + num_masked
        return [sequences * (self.max_tokens if self.aggregation == "constant" else max(count, 1)) for count in counts]
