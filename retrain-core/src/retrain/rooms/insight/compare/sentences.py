"""Sentences about a comparison, the same for terminal, Markdown and JSON."""

from __future__ import annotations

from collections import Counter

from retrain.rooms.evidence.stats.power import MOST_SEEDS
from retrain.rooms.evidence.study.budget import Align
from retrain.rooms.evidence.study.family import Comparison, VerdictReason
from retrain.rooms.evidence.study.metric import Metric, shown_difference
from retrain.rooms.evidence.study.study import Study

MOST_DIFFERING = 20
FISHER_NOTE = (
    "Fisher's exact test on held-out completions: those of one prompt, and of one run, are not independent, so its p "
    "is far too small. No verdict uses it."
)


def explanation(comparison: Comparison, metric: Metric) -> str:
    """The reason for the verdict, and what it would take to change it."""
    match comparison.cause:
        case VerdictReason.FOUND:
            return f"p = {probability(comparison.p_holm)}, at most {comparison.alpha:g}; the interval leaves out zero"
        case VerdictReason.TOO_FEW:
            return _too_few(comparison)
        case VerdictReason.DISAGREE:
            return f"p = {probability(comparison.p_holm)}, but the interval does not leave out zero on the same side"
    parts = [f"p = {probability(comparison.p_holm)} is above {comparison.alpha:g}"]
    if comparison.detectable is not None:
        difference = shown_difference(comparison.detectable, metric, signed=False)
        parts.append(f"with {len(comparison.seeds)} seeds a true difference of {difference} is found 4 times in 5")
    return "; ".join([*parts, *_more_seeds(comparison, metric)])


def probability(p: float | None) -> str:
    """A p value to two digits."""
    if p is None:
        return "—"
    return f"{p:.2g}" if p >= 1e-4 else f"{p:.0e}"


def runs_sentence(study: Study) -> str:
    """How many runs are compared, and why the others are left out."""
    compared, requested = (
        sum(len(each.seeds) for each in study.conditions),
        sum(each.num_runs for each in study.conditions),
    )
    others = Counter(each.reason for each in study.left_out)
    left_out = "".join(f", {count} left out ({reason})" for reason, count in others.most_common())
    return f"{len(study.conditions)} conditions, {requested} runs: {compared} compared{left_out}"


def budget_sentence(study: Study) -> str:
    """Where the curves are cut."""
    cut = f"Cut at {study.budget:,.6g} {study.align}"
    if study.shortest:
        more = f" and {len(study.shortest) - 1} more" if len(study.shortest) > 1 else ""
        return f"{cut}: the end of {study.shortest[0]}{more}"
    return cut + (", which every compared run has" if study.align is Align.STEPS else " of every compared run")


def metric_sentence(study: Study) -> str:
    """The metric that decides."""
    planned = f", plan {study.plan.sha256[:12]}" if study.plan else ""
    return f"Decides: {study.metric}, {study.direction} is better, alpha {study.alpha:g}{planned}"


def standing(study: Study) -> str:
    """`as planned`, or `exploratory` and why."""
    if not study.exploratory:
        return f"As planned: {study.plan.hypothesis}" if study.plan else "As planned"
    return "Exploratory: " + "; ".join(study.exploratory)


def differing(study: Study) -> list[str]:
    """In what the compared runs differ besides what their conditions say, and how many cannot be judged in that."""
    told = [f"differs in more than its condition says: {line}" for line in study.undeclared[:MOST_DIFFERING]]
    if len(study.undeclared) > MOST_DIFFERING:
        told.append(f"and {len(study.undeclared) - MOST_DIFFERING} more differences: --json has all of them")
    if study.unknown:
        runs = f"{study.unknown} run{'' if study.unknown == 1 else 's'}"
        told.append(f"{runs} recorded no code and data, as earlier versions did not: whether these differ is unknown")
    return told


def survivors(study: Study) -> list[str]:
    """A warning for each condition that lost runs: the remaining ones may be the luckier ones."""
    return [
        f"{each.label}: {len(each.seeds)} of {each.num_runs} runs are compared; those that ended early may be worse"
        for each in study.conditions
        if 0 < len(each.seeds) < each.num_runs
    ]


def _too_few(comparison: Comparison) -> str:
    num_seeds, least = len(comparison.seeds), f"{comparison.least_seeds} seeds are the least"
    if num_seeds < 2:
        common = f"{num_seeds} seed{'' if num_seeds == 1 else 's'} in common"
        return f"with {common} nothing can be tested: this cannot tell; {least}"
    smallest, comparisons = comparison.smallest_p, comparison.num_comparisons
    corrected = f" ({min(1.0, comparisons * smallest):.2g} after Holm over {comparisons})" if comparisons > 1 else ""
    differing = "" if comparison.d_z is not None else ", none of which spreads,"
    possible = f"the smallest possible p is {smallest:.2g}{corrected}"
    return f"with {num_seeds} seeds{differing} {possible}: this cannot tell; {least}"


def _more_seeds(comparison: Comparison, metric: Metric) -> list[str]:
    observed = shown_difference(comparison.difference, metric)
    if comparison.more_seeds:
        return [f"about {comparison.more_seeds} more seeds are needed to find {observed}, if that is the true one"]
    if comparison.d_z is not None and comparison.seeds_needed is None:
        return [f"to find {observed} would take more than {MOST_SEEDS:,} seeds"]
    return []
