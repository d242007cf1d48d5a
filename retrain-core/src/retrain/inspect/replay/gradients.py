"""Gradients of a step: of all its rows, each group's share, and the weight of each token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.losses import LossTrial
from retrain.kernel.registry import Plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import ActionRow, Completion, Floats, Group, LogprobRow, TrainBatch

Gradient = NDArray[np.float32]
# Enough for inner products within 0.3 %, and 2 MB per group where a gradient has millions of numbers.
FOLDED = 2**18
# A copy of the whole gradient as float64 would need twice its memory.
CHUNK = 2**20
LEVEL = 0.95
# Rounding error of 1 - cosine between two float32 gradients.
ROUNDING = 1e-6
# A resample of groups without gradient has no direction. Quantiles over the rest of many would mislead.
MOST_UNDEFINED = 0.05
Key = tuple[int, bytes, bytes]  # a row by its group, tokens and actions


@runtime_checkable
class GivesGradients(Protocol):
    """A backend that computes the gradient of a loss at its present weights and changes nothing."""

    def gradient(
        self, config: Config, plugins: Plugins, batch: TrainBatch, rows: Sequence[int]
    ) -> tuple[Gradient, float, int]:
        """Return these rows' share in the gradient of the loss, flat; their part of the loss; clipped tokens.

        The loss and its denominator are the whole batch's under `config`: shares of all rows add up. All rows at once
        are computed as `train` would, bit for bit.
        """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepGradient:
    """The gradient of a step under one condition: all of it, and each group's share as `Folding` keeps it."""

    whole_N: Gradient
    loss: float
    clipped: int
    shares: Mapping[int, Floats]


class Folding:
    """Keeps enough of a long vector for its inner products with others.

    Up to `FOLDED` numbers are kept unchanged. Longer vectors become `FOLDED` sums of entries with random signs in
    random places (a count sketch, Charikar et al. 2002). The inner product of two of them is unbiased, with a standard
    error of at most sqrt(2 / FOLDED) |a||b|, 0.3 %.
    """

    def __init__(self, seeds: Seeds, *, size: int = FOLDED) -> None:
        self._seeds, self._size = seeds, size

    def of(self, vector_N: Gradient) -> Floats:
        if len(vector_N) <= self._size:
            return vector_N.astype(np.float64)
        folded = np.zeros(self._size)
        for number, begin in enumerate(range(0, len(vector_N), CHUNK)):
            part = vector_N[begin : begin + CHUNK].astype(np.float64)
            # One draw gives the place and, by its lowest bit, the sign. The stream is fixed, so all vectors fold alike.
            places = self._seeds.stream("replay", "fold", number).integers(0, 2 * self._size, len(part))
            signed = np.where(places % 2 == 0, part, -part)
            folded += np.bincount(places // 2, weights=signed, minlength=self._size)
        return folded


def inner(a_N: Gradient, b_N: Gradient) -> float:
    parts = range(0, len(a_N), CHUNK)
    # float64, because float32 loses the small difference from 1 that a cosine of similar gradients has.
    return float(sum(np.dot(a_N[i : i + CHUNK].astype(np.float64), b_N[i : i + CHUNK]) for i in parts))


def step_gradient(
    backend: GivesGradients, config: Config, plugins: Plugins, batch: TrainBatch, folding: Folding | None
) -> StepGradient:
    whole_N, loss, clipped = backend.gradient(config, plugins, batch, range(len(batch.rows)))
    shares: dict[int, Floats] = {}
    if folding:
        groups: dict[int, list[int]] = {}
        for number, row in enumerate(batch.rows):
            groups.setdefault(row.group, []).append(number)
        for group, rows in groups.items():
            shares[group] = folding.of(backend.gradient(config, plugins, batch, rows)[0])
    return StepGradient(whole_N=whole_N, loss=loss, clipped=clipped, shares=shares)


# The angle between the gradient of a condition and the one taken, and the prompts and tokens that turn it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One gradient against the one taken.

    `cosine` is None when one of them is 0. `low` and `high` are the middle 95 % over resampled groups, None without
    resamples or where too many had no direction. `parts` add up to 1 - cosine, group by group: positive ones turn it;
    empty where nothing turns beyond rounding.
    """

    cosine: float | None
    low: float | None
    high: float | None
    norm: float
    norm_ratio: float | None
    parts: Mapping[int, float]

    @property
    def turns(self) -> bool:
        """True if the direction changes by more than float32 rounds."""
        return self.cosine is not None and 1.0 - self.cosine > ROUNDING


def turn_of(taken: StepGradient, other: StepGradient, *, seeds: Seeds, step: int, groups: int, resamples: int) -> Turn:
    """Compare two gradients of a step with `groups` groups, those without gradient included."""
    norm_0, norm = np.sqrt(inner(taken.whole_N, taken.whole_N)), np.sqrt(inner(other.whole_N, other.whole_N))
    cosine = None
    if norm_0 > 0 and norm > 0:
        # Rounding may put the cosine of two equal gradients above 1.
        cosine = float(np.clip(inner(taken.whole_N, other.whole_N) / (norm_0 * norm), -1.0, 1.0))
    low = high = None
    parts: dict[int, float] = {}
    if taken.shares and other.shares and cosine is not None:
        own_PP, cross_PP, other_PP = _products(taken.shares, other.shares, groups)
        low, high = interval(own_PP, cross_PP, other_PP, seeds.stream("replay", step, "groups"), resamples)
        parts = _parts(own_PP, cross_PP, other_PP, float(norm_0), float(norm))
    ratio = float(norm / norm_0) if norm_0 > 0 else None
    turn = Turn(cosine=cosine, low=low, high=high, norm=float(norm), norm_ratio=ratio, parts=parts)
    # Parts of a difference that is only rounding would blame groups at random.
    return turn if turn.turns else replace(turn, parts={})


def interval(
    own_PP: Floats, cross_PP: Floats, other_PP: Floats, stream: np.random.Generator, resamples: int
) -> tuple[float | None, float | None]:
    """Return the middle 95 % of the cosine over `resamples` samples of as many groups, with replacement.

    Row p, column q of each matrix is the inner product of the shares of groups p and q: of the gradient taken with
    itself, of it with the other one, and of the other one with itself. Credit is not assigned again: a group's share of
    others' credit (a batch's mean) stays. (None, None) when more than 5 % of the samples have no direction.
    """
    if resamples == 0:
        return None, None
    # The cosine needs only inner products of shares, so that a resample costs no gradient.
    size = len(own_PP)
    weights_RP = stream.multinomial(size, np.full(size, 1.0 / size), size=resamples).astype(np.float64)
    own_R, cross_R, other_R = (
        np.einsum("rp,pq,rq->r", weights_RP, products_PP, weights_RP, optimize=True)
        for products_PP in (own_PP, cross_PP, other_PP)
    )
    is_defined_R = (own_R > 0) & (other_R > 0)
    if np.mean(~is_defined_R) > MOST_UNDEFINED:
        return None, None
    cosines = np.clip(cross_R[is_defined_R] / np.sqrt(own_R[is_defined_R] * other_R[is_defined_R]), -1.0, 1.0)
    low, high = np.quantile(cosines, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _products(taken: Mapping[int, Floats], other: Mapping[int, Floats], groups: int) -> tuple[Floats, Floats, Floats]:
    def products(left: Mapping[int, Floats], right: Mapping[int, Floats]) -> Floats:
        found_PP = np.zeros((groups, groups))
        rows, columns = sorted(left), sorted(right)
        found_PP[np.ix_(rows, columns)] = np.stack([left[p] for p in rows]) @ np.stack([right[q] for q in columns]).T
        return found_PP

    return products(taken, taken), products(taken, other), products(other, other)


def _parts(own_PP: Floats, cross_PP: Floats, other_PP: Floats, norm_0: float, norm: float) -> dict[int, float]:
    """Return each group's part of 1 - cosine: <d_p, d> / 2, where d = g/|g| - g0/|g0| and d_p the group's share of d.

    1 - cosine = |d|^2 / 2, because both are unit vectors.
    """
    of_other_P = other_PP.sum(1) / norm**2 - cross_PP.sum(0) / (norm * norm_0)
    of_taken_P = cross_PP.sum(1) / (norm * norm_0) - own_PP.sum(1) / norm_0**2
    return {group: float(part) for group, part in enumerate((of_other_P - of_taken_P) / 2.0)}


def largest(parts: Mapping[int, float], most: int) -> Sequence[tuple[int, float]]:
    ranked = sorted(parts.items(), key=lambda pair: -pair[1])
    return [(group, part) for group, part in ranked[:most] if part > 0.0]


# The weight of a token: minus the derivative of the loss by its log-probability. Above 0 it becomes likelier.


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChange:
    """A token whose weight in the gradient changes: its position, and its weight over the gradient's norm.

    `token` is its text, `reward` its completion's.
    """

    group: int
    index: int
    position: int
    before: float
    after: float
    token: str = ""
    reward: float | None = None


class TokenWeights:
    """The weights of a step's action tokens, under any condition, at the log-probabilities of the policy before it."""

    def __init__(
        self,
        groups: Sequence[Group],
        plugins: Plugins,
        logprobs: Callable[[Sequence[ActionRow], float], list[Floats]],
        temperature: float,
    ) -> None:
        self._groups, self._plugins = groups, plugins
        parts = [
            (number, _context(completion, span))
            for number, group in enumerate(groups)
            for completion in group.completions
            for span in completion.contexts
        ]
        found = logprobs([part for _, part in parts], temperature)
        self._logprobs = {_key(number, part): values_T for (number, part), values_T in zip(parts, found, strict=True)}
        certain = {
            _key(number, part): [np.exp(values_T[part.action_T])]
            for (number, part), values_T in zip(parts, found, strict=True)
        }
        self.open = {place: 1.0 - chances_A for place, chances_A in self._by_completion(certain).items()}

    def of(self, config: Config, batch: TrainBatch) -> dict[tuple[int, int], Floats] | None:
        """Return weights by group and completion, one for each action token; 0 where it is not trained.

        None where no backend can compute them, or an algorithm trains rows that it made. Completions that are equal
        to the token each get the mean. Terms of [kl] and [entropy] are left out.
        """
        keys = [_key(row.group, row) for row in batch.rows]
        if not all(key in self._logprobs for key in keys):
            return None
        trial = LossTrial(batch=batch, logprobs=[self._logprobs[key] for key in keys], packs=[range(len(keys))])
        name = config.backend.backend
        value = self._plugins.call_backend("evaluate_loss", config, self._plugins, trial, backend=name)
        if value is None:
            return None
        by_key: dict[Key, list[Floats]] = {}
        for key, row, gradient_T in zip(keys, batch.rows, value.gradients, strict=True):
            by_key.setdefault(key, []).append(-gradient_T[row.action_T])
        return self._by_completion(by_key)

    def _by_completion(self, by_key: Mapping[Key, list[Floats]]) -> dict[tuple[int, int], Floats]:
        found: dict[tuple[int, int], Floats] = {}
        for number, group in enumerate(self._groups):
            for index, completion in enumerate(group.completions):
                contexts = [_context(completion, span) for span in completion.contexts]
                given = [(by_key.get(_key(number, each)), np.count_nonzero(each.action_T)) for each in contexts]
                if given:
                    means = [np.zeros(size) if rows is None else np.mean(rows, axis=0) for rows, size in given]
                    found[number, index] = np.concatenate(means)
        return found


def token_changes(
    taken: Mapping[tuple[int, int], Floats],
    other: Mapping[tuple[int, int], Floats],
    open_: Mapping[tuple[int, int], Floats],
    *,
    norms: tuple[float, float],
    most: int,
) -> list[TokenChange]:
    """Return the tokens that turn the gradient most: change of weight over the gradients' norms, times 1 - p.

    1 - p is the derivative of log p by the token's logit: one that was certain moves nothing, whatever it weighs.
    """
    found = []
    for (group, index), before_A in taken.items():
        was_A, is_A = before_A / norms[0], other[group, index] / norms[1]
        # Weights are over the norms: only a change of direction counts, not one of length.
        sizes_A = np.abs(is_A - was_A) * open_[group, index]
        for position in np.argsort(-sizes_A, kind="stable")[:most]:
            before, after = float(was_A[position]), float(is_A[position])
            change = TokenChange(group=group, index=index, position=int(position), before=before, after=after)
            found.append((float(sizes_A[position]), change))
    ranked = sorted(found, key=lambda pair: -pair[0])
    return [change for size, change in ranked[:most] if size > 0.0]


def _context(completion: Completion, span: slice) -> LogprobRow:
    return LogprobRow(completion.tokens_T[span], completion.action_T[span])


def _key(group: int, row: ActionRow) -> Key:
    return group, row.tokens_T.tobytes(), row.action_T.tobytes()
