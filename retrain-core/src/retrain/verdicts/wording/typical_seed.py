"""What a verdict, which is about the typical seed, leaves out: how often it holds, lost runs and collapsed seeds."""

from __future__ import annotations

from collections.abc import Sequence

from retrain.records.runs.metric import shown
from retrain.verdicts.study.comparison import Comparison, Verdict
from retrain.verdicts.study.study import Study
from retrain.verdicts.wording.words import sized

MOST_SEEDS = 5


def seeds_sentence(comparison: Comparison) -> str:
    """How many seeds agree, with exact limits for the chance of another seed; empty without a common seed."""
    seeds = comparison.per_seed
    if seeds is None:
        return ""
    low, high = (f"{100 * limit:.0f}" for limit in seeds.in_pairs.interval)
    tied = f", {seeds.ties} tied" if seeds.ties else ""
    chance = f"the chance that another seed is better is {low} to {high} %"
    return f"better in {seeds.wins} of {len(seeds.baseline)} seeds{tied}: {chance}"


def lost_sentence(comparison: Comparison, study: Study) -> str:
    """The second line, with lost runs at the worst value seen; empty if no run was lost."""
    lost = comparison.lost
    if lost is None or lost.difference is None:
        return ""
    sides = ((comparison.baseline, lost.baseline_seeds), (comparison.condition, lost.condition_seeds))
    runs = " and ".join(f"{_runs(len(seeds))} of {label}" for label, seeds in sides if seeds)
    size = sized(lost.difference, lost.interval, lost.level, study.metric)
    line = f"with {runs} at the worst value seen ({shown(lost.worst, study.metric)}): {lost.verdict}, {size}"
    if lost.survives or comparison.verdict is Verdict.CANNOT_TELL:
        return line
    return f"{line}; '{comparison.verdict}' does not survive the lost runs"


def collapse_sentences(study: Study) -> list[str]:
    """A warning for each condition with collapsed seeds."""
    return [
        f"{each.condition}: {_seeds(each.seeds)} far from the others (worst {shown(each.worst, study.metric)}, median "
        f"{shown(each.median, study.metric)}); a verdict is about the typical seed and does not rule out such a one"
        for each in study.collapses
    ]


def _runs(number: int) -> str:
    return f"{number} lost run{'' if number == 1 else 's'}"


def _seeds(seeds: Sequence[int]) -> str:
    more = f" and {len(seeds) - MOST_SEEDS} more" if len(seeds) > MOST_SEEDS else ""
    named = ", ".join(map(str, seeds[:MOST_SEEDS])) + more
    return f"seed {named} lies" if len(seeds) == 1 else f"seeds {named} lie"
