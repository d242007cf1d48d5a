"""The policy losses as the service computes them, for its requests and to check its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from retrain.api import BackendError, Config, Floats, Mask, NonFiniteError, Problem, Tokens, TrainRow

Reduction = Literal["token_sum", "sequence_mean"]
LIKELIHOOD, CROSS_ENTROPY, DRO = "likelihood", "cross_entropy", "dro"
# Keeps exp() of an extreme mismatch finite.
MAX_LOG_RATIO = 20.0
CLIP_EPS, CISPO_WEIGHT, DRO_BETA = 0.2, 4.0, 0.1  # where [algorithm] says nothing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Datum:
    """One row, shifted: position t holds an input token and the data of the token predicted from it.

    All arrays are one shorter than the row. `logprobs_T` and `advantages_T` are 0 where `action_T` is False: prompt and
    environment tokens are read but not trained.
    """

    inputs_T: Tokens
    targets_T: Tokens
    action_T: Mask
    logprobs_T: Floats
    advantages_T: Floats

    @classmethod
    def of(cls, row: TrainRow) -> Datum:
        """Shift a row: inputs are tokens[:-1]; all else belongs to tokens[1:]."""
        action_T = row.action_T[1:]
        return cls(
            inputs_T=row.tokens_T[:-1],
            targets_T=row.tokens_T[1:],
            action_T=action_T,
            logprobs_T=np.where(action_T, row.logprobs_T[1:], 0.0),
            advantages_T=np.where(action_T, row.advantages_T[1:], 0.0),
        )

    def weighted(self, factors_N: Floats, logprobs_N: Floats) -> Datum:
        logprobs_T, advantages_T = np.zeros(len(self.targets_T)), self.advantages_T.copy()
        logprobs_T[self.action_T] = logprobs_N
        advantages_T[self.action_T] *= factors_N
        return replace(self, logprobs_T=logprobs_T, advantages_T=advantages_T)

    def pulled_nowhere(self, now_T: Floats) -> Datum:
        """The same with the trainer's log-probabilities at prompt tokens: the penalty of dro covers them, too."""
        return replace(self, logprobs_T=np.where(self.action_T, self.logprobs_T, now_T))


def scales(datums: Sequence[Datum], reduction: Reduction, denominators: Sequence[int]) -> list[float]:
    """Return the factor of each datum's advantages by which the service ends up dividing its terms by its denominator.

    With N datums of L_i targets each and denominators d_i (for a mean over tokens, the action tokens of all datums), a
    sum over tokens needs 1 / d_i. A mean over each datum followed by a mean over datums divides token losses by L_i N,
    prompts included, and needs L_i N / d_i.
    """
    if reduction == "token_sum":
        return [1.0 / denominator for denominator in denominators]
    return [len(d.targets_T) * len(datums) / n for d, n in zip(datums, denominators, strict=True)]


def untrained_row(tokens_T: Tokens, action_T: Mask) -> TrainRow:
    zeros_T = np.zeros(len(tokens_T))
    return TrainRow(tokens_T=tokens_T, action_T=action_T, logprobs_T=zeros_T, advantages_T=zeros_T)


def check_rows(rows: Sequence[TrainRow]) -> None:
    """Raise BackendError on a malformed row, NonFiniteError on a non-finite number; both name the row."""
    for index, row in enumerate(rows):
        length = len(row.tokens_T)
        if not length == len(row.action_T) == len(row.logprobs_T) == len(row.advantages_T):
            raise _bad_rows(f"row {index}: tokens, actions, log-probabilities and advantages differ in length")
        if length < 2 or row.action_T[0]:
            raise _bad_rows(f"row {index}: no token precedes its first action to predict it from")
        for name, values_T in (("log-probability", row.logprobs_T), ("advantage", row.advantages_T)):
            faulty = np.flatnonzero(row.action_T & ~np.isfinite(values_T))
            if len(faulty):
                what = f"row {index} of a batch for Tinker: the {name} of token {faulty[0]} is {values_T[faulty[0]]}"
                fix = "correct the plugin that made the rows"
                raise NonFiniteError(Problem(code="tinker.non-finite-row", where="training", what=what, fix=fix))
    if not any(row.action_T.any() for row in rows):
        raise _bad_rows("no row of the batch has an action token to train on")


def _bad_rows(reason: str) -> BackendError:
    what, fix = f"the rows cannot be trained on: {reason}", "correct the plugin that made the rows"
    return BackendError(Problem(code="tinker.bad-rows", where="training", what=what, fix=fix))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """`[algorithm] loss` and its parameters: bounds of the ratio (ppo, cispo), `beta` (dro), and bounds of the weight.

    The weight is the ratio of the trainer before the step to the sampler, by `is_level`; None without `is_bounds`.
    """

    kind: str = "importance_sampling"
    low: float = 0.8
    high: float = 1.2
    beta: float = DRO_BETA
    is_bounds: tuple[float, float] | None = None
    is_level: str = "token"
    is_mode: str = "truncate"
    off_policy_mask: float = 0.0
    aggregation: str = "token_mean"
    max_tokens: int = 1

    @classmethod
    def of(cls, config: Config) -> PolicyLoss:
        algorithm, is_cispo = config.algorithm, config.algorithm.loss == "cispo"
        eps, cap = algorithm.clip_eps or CLIP_EPS, algorithm.tis_cap
        bounds = list[float](config.algorithm.is_bounds) or ([0.0, cap] if cap > 0.0 else [])
        return cls(
            kind=algorithm.loss,
            low=0.0 if is_cispo else 1.0 - eps,
            high=algorithm.clip_eps_high or CISPO_WEIGHT if is_cispo else 1.0 + (algorithm.clip_eps_high or eps),
            beta=float(algorithm.loss_params.get("beta", DRO_BETA)),
            off_policy_mask=algorithm.off_policy_mask,
            is_bounds=(bounds[0], bounds[1]) if bounds else None,
            is_level=config.algorithm.is_level,
            is_mode=config.algorithm.is_mode,
            aggregation=config.algorithm.aggregation or "token_mean",
            max_tokens=config.training.max_tokens,
        )

    @property
    def service_config(self) -> dict[str, float] | None:
        if self.kind == DRO:
            return {"beta": self.beta}
        if self.kind not in ("ppo", "cispo"):
            return None
        return {"clip_low_threshold": self.low, "clip_high_threshold": self.high}

    def terms(self, new_N: Floats, reference_N: Floats, advantages_N: Floats) -> tuple[Floats, Mask]:
        """Loss of each token and whether it was clipped, with rho = exp(new - reference).

        `reference` are the behaviour log-probabilities or, with a weight, the trainer's own before the step.

        importance_sampling: -rho A; ppo: -min(rho A, clip(rho, low, high) A); cispo: -clip(rho, low, high) A new;
        likelihood and its name on the service, cross_entropy: -A new; dro: -A new + beta (new - reference)^2 / 2.
        Each but dro is proportional to A, through which `retrain_tinker.losses` turns sums into means over tokens.
        """
        ratios_N = np.exp(new_N - reference_N)
        bounded_N = ratios_N.clip(self.low, self.high)
        plain_N = ratios_N * advantages_N
        if self.kind == "ppo":
            kept_N = np.minimum(plain_N, bounded_N * advantages_N)
            return -kept_N, kept_N < plain_N
        if self.kind == "cispo":
            return -bounded_N * advantages_N * new_N, bounded_N != ratios_N
        if self.kind in (LIKELIHOOD, CROSS_ENTROPY, DRO):
            plain_N = advantages_N * new_N
        if self.kind == DRO:
            plain_N -= 0.5 * self.beta * (new_N - reference_N) ** 2
        return -plain_N, np.zeros(len(ratios_N), dtype=np.bool_)

    def importance(self, new_N: Floats, behaviour_N: Floats) -> tuple[Floats, Mask]:
        """Return the weight of each token of a row, 1 without weights, and whether it was outside the bounds."""
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

    def left_out(self, new_N: Floats, sampler_N: Floats, advantages_N: Floats) -> Mask:
        """Mark the tokens of a row that `off_policy_mask` leaves out."""
        gap = float(np.sum(sampler_N - new_N)) / max(len(new_N), 1)
        left_N: Mask = (advantages_N < 0.0) & (gap > self.off_policy_mask)
        return left_N

    def denominators(self, counts: Sequence[int], num_masked: int) -> list[int]:
        """Return the divisor of each row's sum of terms, for rows of these numbers of action tokens.

        Rows without actions are no sequences; masked ones count where the loss is divided by sequences.
        """
        if self.aggregation == "token_mean":
            return [sum(counts)] * len(counts)
        sequences = sum(count > 0 for count in counts) + num_masked
        return [sequences * (self.max_tokens if self.aggregation == "constant" else max(count, 1)) for count in counts]
