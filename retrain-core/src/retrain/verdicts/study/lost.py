"""A second line with lost runs at the worst value seen, since the remaining runs of a condition may be the luckier.

Where crashes depend on the condition, dropping them is wrong in up to 14 % of campaigns without any difference; at the
worst value they count against the condition that lost them. It costs power, so it only accompanies the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from retrain.records.runs.metric import Direction
from retrain.records.runs.run_status import DONE, LIVE
from retrain.records.runs.source import Candidate
from retrain.verdicts.study.comparison import Comparison, Lost
from retrain.verdicts.study.judge import Pairing, with_values
from retrain.verdicts.study.per_seed import Values, per_seed

PENDING = (*LIVE, "not started")  # these may still end well
Judged = Callable[[Sequence[Pairing]], Sequence[Comparison]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    values: Mapping[str, Values]
    lost: Mapping[str, tuple[int, ...]]


def sides_of(candidates: Iterable[Candidate], values: Mapping[str, Values], *, is_cut: bool) -> Sides:
    """Return the seeds of each condition without a number although their run ended: it failed, died or stopped.

    A run that continues or has not begun is not lost, nor, where the curves are cut at a given budget (`is_cut`), one
    that was done before it.
    """
    lost: dict[str, dict[int, None]] = {label: {} for label in values}
    for each in candidates:
        is_short = is_cut and each.state == DONE and not each.problem
        is_open = each.state in PENDING or is_short
        if each.seed is not None and each.seed not in values[each.condition] and not is_open:
            lost[each.condition][each.seed] = None
    return Sides(values=values, lost={label: tuple(seeds) for label, seeds in lost.items()})


def with_lost(
    comparisons: Sequence[Comparison],
    pairings: Sequence[Pairing],
    sides: Sides,
    *,
    direction: Direction,
    judged: Judged,
) -> tuple[Comparison, ...]:
    """Return the comparisons, with the second line where runs were lost: the same test over the whole family.

    The worst value is that over all compared runs of all conditions. A seed that both sides lost is a tie.
    """
    seen = [value for values in sides.values.values() for value in values.values()]
    if not seen or not any(sides.lost.values()):
        return tuple(comparisons)
    worst = min(seen) if direction is Direction.HIGHER else max(seen)
    filled = {
        label: {**values, **dict.fromkeys(sides.lost.get(label, ()), worst)} for label, values in sides.values.items()
    }
    again = judged([with_values(each, filled[each.baseline], filled[each.condition]) for each in pairings])
    found = []
    for first, second in zip(comparisons, again, strict=True):
        left, right = sides.lost.get(first.baseline, ()), sides.lost.get(first.condition, ())
        lost = Lost(
            baseline_seeds=left,
            condition_seeds=right,
            worst=worst,
            seeds=second.seeds,
            difference=second.difference,
            interval=second.interval,
            level=second.level,
            p_holm=second.p_holm,
            verdict=second.verdict,
            survives=second.verdict is first.verdict,
        )
        found.append(replace(first, lost=lost) if left or right else first)
    return tuple(found)


def with_seeds(
    comparisons: Sequence[Comparison], values: Mapping[str, Values], *, direction: Direction
) -> tuple[Comparison, ...]:
    found = []
    for each in comparisons:
        own = values[each.baseline]
        ordered = {seed: own[seed] for seed in (*each.seeds, *own)}  # the compared seeds first, in their order
        found.append(replace(each, per_seed=per_seed(ordered, values[each.condition], direction=direction)))
    return tuple(found)
