"""The sum of squared probabilities at every sampled token, measured by the trainer for credit that needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from retrain.credit.kl import given_logprobs
from retrain.kernel.contracts.backend import Backend
from retrain.kernel.types import Floats, Group, LogprobRow


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SquaredProbs:
    """A `Shaper` that changes no reward. Surplus groups are never trained, so they are not measured."""

    backend: Backend
    temperature: float

    def shape(self, step: int, groups: tuple[Group, ...]) -> tuple[tuple[Group, ...], Mapping[str, float]]:
        def asked(rows: list[LogprobRow]) -> list[Floats]:
            return self.backend.squared_probs(rows, self.temperature)

        completions = [c for group in groups if not group.is_surplus for c in group.completions]
        found = iter(given_logprobs(completions, asked, where="training", of="squared probability of the trainer"))
        return tuple(
            group
            if group.is_surplus
            else replace(group, completions=tuple(replace(c, squared_probs_T=next(found)) for c in group.completions))
            for group in groups
        ), {}
