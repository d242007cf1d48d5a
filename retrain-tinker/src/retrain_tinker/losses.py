"""The policy losses as the service computes them, for its requests and to check its results."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from retrain.api import Config, Floats, Mask

CLIP_EPS, CISPO_WEIGHT = 0.2, 4.0  # where [algorithm] says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """`[algorithm] loss` and its parameters: bounds of the ratio (ppo, cispo), cap of the weight (0 = off)."""

    kind: str = "importance_sampling"
    low: float = 0.8
    high: float = 1.2
    tis_cap: float = 0.0

    @classmethod
    def of(cls, config: Config) -> PolicyLoss:
        """The loss of `[algorithm]`; cispo bounds its weight only from above."""
        algorithm, is_cispo = config.algorithm, config.algorithm.loss == "cispo"
        eps = algorithm.clip_eps or CLIP_EPS
        return cls(
            kind=algorithm.loss,
            low=0.0 if is_cispo else 1.0 - eps,
            high=algorithm.clip_eps_high or CISPO_WEIGHT if is_cispo else 1.0 + (algorithm.clip_eps_high or eps),
            tis_cap=algorithm.tis_cap,
        )

    @property
    def service_config(self) -> dict[str, float] | None:
        """`loss_fn_config` of the request."""
        if self.kind == "importance_sampling":
            return None
        return {"clip_low_threshold": self.low, "clip_high_threshold": self.high}

    def terms(self, new_N: Floats, reference_N: Floats, advantages_N: Floats) -> tuple[Floats, Mask]:
        """Loss of each token and whether it was clipped, with rho = exp(new - reference).

        `reference` are the behaviour log-probabilities or, with `tis_cap`, the trainer's own before the step.

        importance_sampling: -rho A; ppo: -min(rho A, clip(rho, low, high) A); cispo: -clip(rho, low, high) A new.
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
        return -plain_N, np.zeros(len(ratios_N), dtype=np.bool_)

    def importance(self, new_N: Floats, behaviour_N: Floats) -> tuple[Floats, Mask]:
        """Weight min(rho, tis_cap) of each token, 1 where the cap is off, and whether it was truncated."""
        if self.tis_cap <= 0.0:
            return np.ones(len(new_N)), np.zeros(len(new_N), dtype=np.bool_)
        ratios_N = np.exp(new_N - behaviour_N)
        return ratios_N.clip(max=self.tis_cap), ratios_N > self.tis_cap
