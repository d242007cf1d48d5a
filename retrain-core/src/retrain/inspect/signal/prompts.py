"""Prompts and difficulties: the chance that their next group teaches, their cost, and the calibration of forecasts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from retrain.inspect.signal.drawn import Drawn, Ints
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Floats, Mask
from retrain.verdicts.stats.teaching import Calibration, RateBook, calibration

BINS, DRAWS = 10, 1000
# Fixed, so that the same files give the same interval.
_STREAMS = Seeds(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAccount:
    """One prompt after the last step: its `rate` ~ Beta, and the `chance` that its next group teaches.

    Both are None without verdicts. `credit` is its sum of |A|. `difficulty` comes from the example, or is the share
    right in its first group.
    """

    example: str
    difficulty: str
    groups: int
    teaching_groups: int
    tokens: int
    taught_tokens: int
    credit: float
    rate: tuple[float, float] | None
    chance: float | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forecasts:
    """The forecast chance of each group with a verdict, from earlier steps only, and whether it taught.

    `block_F` is the run and step of each: groups of one step share a policy.
    """

    chance_F: Floats
    taught_F: Mask
    block_F: Ints

    @classmethod
    def joined(cls, parts: Iterable[Forecasts]) -> Forecasts:
        given = list(parts)
        offsets = np.cumsum([0, *(int(each.block_F.max(initial=-1)) + 1 for each in given)])
        blocks = [each.block_F + offset for each, offset in zip(given, offsets[:-1], strict=True)]
        return cls(
            chance_F=np.concatenate([np.zeros(0), *(each.chance_F for each in given)]),
            taught_F=np.concatenate([np.zeros(0, np.bool_), *(each.taught_F for each in given)]),
            block_F=np.concatenate([np.zeros(0, np.int64), *blocks]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Calibration of forecasts, with an interval that covers the true error of its bins with at least 95 %."""

    calibration: Calibration
    interval: tuple[float, float]


def forecast_groups(drawn: Drawn, teaches_G: Mask, *, correct_above: float) -> tuple[Forecasts, RateBook]:
    """Return the forecast of every group with a verdict, and the book after the last step."""
    book, chances, taught, blocks = RateBook(), list[float](), list[bool](), list[int]()
    groups = list(drawn.groups())
    steps_G = drawn.step_N[drawn.starts_G]
    is_judged_N = ~np.isnan(drawn.credited_N)  # a truncated and dropped one is not
    # The comparison is false for NaN: no verdict is not right.
    is_right_N = (drawn.rewards_N > correct_above) & is_judged_N
    sizes_G = [int(is_judged_N[group].sum()) for group in groups]
    for step in np.unique(steps_G).tolist():
        judged = [number for number in np.flatnonzero(steps_G == step).tolist() if sizes_G[number]]
        by_size: dict[int, list[int]] = {}
        for number in judged:
            by_size.setdefault(sizes_G[number], []).append(number)
        names = {number: drawn.examples[drawn.example_N[groups[number].start]] for number in judged}
        for size, numbers in by_size.items():
            chances += book.chances([names[number] for number in numbers], step, size).tolist()
            taught += teaches_G[numbers].tolist()
            blocks += [step] * len(numbers)
        for number in judged:
            book.observe(names[number], step, int(is_right_N[groups[number]].sum()), sizes_G[number])
    found = Forecasts(
        chance_F=np.clip(np.array(chances), 0.0, 1.0),
        taught_F=np.array(taught, dtype=np.bool_),
        block_F=np.array(blocks, dtype=np.int64),
    )
    return found, book


def checked(forecasts: Forecasts) -> Checked | None:
    """Return the calibration in ten bins of equal counts; None without forecasts.

    With d the true differences of the bins, d' the measured ones and w the bins' weights, |ECE' - ECE| is at most
    sum w |d' - d|. The interval is ECE' -+ the 95th percentile of that sum over resampled steps: on the wide side.
    """
    found = calibration(forecasts.chance_F.tolist(), forecasts.taught_F.tolist(), bins=BINS)
    if found is None:
        return None
    _, block_F = np.unique(forecasts.block_F, return_inverse=True)
    # These must be the bins of `calibration`, ties included.
    order = np.argsort(forecasts.chance_F, kind="stable")
    bin_F = np.empty(order.size, dtype=np.int64)
    for number, part in enumerate(part for part in np.array_split(order, BINS) if part.size):
        bin_F[part] = number
    num_blocks, num_bins = int(block_F.max()) + 1, len(found.bins)
    cell_F = block_F * num_bins + bin_F

    def summed(weights_F: Floats) -> Floats:
        sums = np.bincount(cell_F, weights=weights_F, minlength=num_blocks * num_bins).astype(np.float64)
        return sums.reshape(num_blocks, num_bins)

    difference_SB, count_SB = summed(forecasts.taught_F - forecasts.chance_F), summed(np.ones(order.size))
    # Whole steps are resampled, because groups of one step share a policy and are not independent.
    rng = _STREAMS.stream("signal", order.size)
    drawn_RS = rng.multinomial(num_blocks, np.full(num_blocks, 1 / num_blocks), size=DRAWS).astype(np.float64)
    count_RB = drawn_RS @ count_SB
    difference_RB = (drawn_RS @ difference_SB) / np.maximum(count_RB, 1.0)
    measured_B = difference_SB.sum(axis=0) / count_SB.sum(axis=0)
    noise_R = (np.abs(difference_RB - measured_B) * count_SB.sum(axis=0) / order.size).sum(axis=1)
    half = float(np.quantile(noise_R, 0.95))
    return Checked(calibration=found, interval=(max(0.0, found.error - half), min(1.0, found.error + half)))


def prompt_accounts(
    drawn: Drawn,
    taught_N: Ints,
    credit_N: Floats,
    teaches_G: Mask,
    book: RateBook,
    *,
    group_size: int,
    correct_above: float,
) -> list[PromptAccount]:
    """Return every prompt of a run in the order of its first group; `taught_N` are the tokens that taught."""
    size = len(drawn.examples)
    example_G = drawn.example_N[drawn.starts_G]
    groups_E, teaching_E = np.bincount(example_G, minlength=size), np.bincount(example_G[teaches_G], minlength=size)
    tokens_E = np.bincount(drawn.example_N, weights=drawn.tokens_N, minlength=size)
    taught_E = np.bincount(drawn.example_N, weights=taught_N, minlength=size)
    credit_E = np.bincount(drawn.example_N, weights=credit_N * drawn.is_trained_N, minlength=size)
    has_verdicts = bool(np.isfinite(drawn.rewards_N).any())
    after = int(drawn.step_N.max(initial=-1)) + 1
    chance_E = book.chances(drawn.examples, after, group_size) if has_verdicts else np.zeros(size)
    first = _first_rates(drawn, correct_above) if not drawn.difficulties else {}
    return [
        PromptAccount(
            example=name,
            difficulty=drawn.difficulties.get(name, first.get(number, "")),
            groups=int(groups_E[number]),
            teaching_groups=int(teaching_E[number]),
            tokens=int(tokens_E[number]),
            taught_tokens=int(taught_E[number]),
            credit=float(credit_E[number]),
            rate=book.rate(name, after) if has_verdicts else None,
            chance=float(chance_E[number]) if has_verdicts else None,
        )
        for number, name in enumerate(drawn.examples)
    ]


def _first_rates(drawn: Drawn, correct_above: float) -> dict[int, str]:
    """Label each prompt by the share right in its first judged group."""
    found: dict[int, str] = {}
    for group in drawn.groups():
        rewards = drawn.rewards_N[group]
        judged = rewards[~np.isnan(rewards)]
        if judged.size:
            found.setdefault(int(drawn.example_N[group.start]), rate_label(float((judged > correct_above).mean())))
    return found


RATE_LABELS = ("none right at first", "up to 25 %", "25 to 50 %", "50 to 75 %", "75 % and more", "all right at first")


def rate_label(rate: float) -> str:
    if rate in (0.0, 1.0):
        return RATE_LABELS[0 if rate == 0.0 else -1]
    return RATE_LABELS[1 + min(3, int(rate * 4))]
