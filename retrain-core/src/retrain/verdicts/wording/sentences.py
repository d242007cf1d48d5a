"""Sentences about a comparison, the same for terminal, Markdown and JSON."""

from __future__ import annotations

from collections import Counter

from retrain.records.runs.budget import Align
from retrain.records.runs.metric import Metric, shown_difference
from retrain.text.amounts import counted
from retrain.verdicts.ledger.looks import looks_sentence as recorded_looks
from retrain.verdicts.stats.e_process import fewest_equal
from retrain.verdicts.stats.power import spread_range
from retrain.verdicts.study.comparison import Comparison, Design, Verdict, VerdictReason
from retrain.verdicts.study.controls import controls_sentence
from retrain.verdicts.study.reach import reach_of, reach_sentences
from retrain.verdicts.study.study import Study

MOST_DIFFERING = 20
UNVERIFIED = "no ledger here has the plan and every run"


def explanation(comparison: Comparison, study: Study) -> str:
    """Return the reason for the verdict: the corrected p, and the least that these seeds could show."""
    p = f"p = {probability(comparison.p_holm)}{_corrected(comparison)}"
    match comparison.cause:
        case VerdictReason.FOUND:
            found = f"{p}, at most {comparison.alpha:g}: chance alone would rarely give such a difference."
            return f"{found} It is {controls_sentence(comparison, study.metric)}." if comparison.controls else found
        case VerdictReason.NOT_BEYOND_CONTROL:
            return f"{p}, but a gain counts only beyond that of training with useless rewards, or with none."
        case VerdictReason.WITHIN | VerdictReason.FOUND_WITHIN:
            margin = shown_difference(comparison.margin, study.metric, signed=False)
            inside = f"the interval lies inside the planned margin of ±{margin}."
            return inside if comparison.cause is VerdictReason.WITHIN else f"A difference is found, but {inside}"
        case VerdictReason.TOO_FEW:
            return _too_few(comparison)
    return f"{p} is above {comparison.alpha:g}{_detectable(comparison, study.metric)}."


def next_step(study: Study) -> str:
    """Return a next step where the runs are undecided, without a test that looking and adding would make wrong."""
    fixed = [each for each in study.comparisons if _is_fixed(each) and each.verdict is Verdict.CANNOT_TELL]
    if not fixed:
        return ""
    least = max(each.least_seeds for each in fixed)
    added = max(fewest_equal(each.alpha / each.num_comparisons) for each in fixed)
    return (
        f"to find out more: plan a campaign with at least {least} other seeds, or with planned looks ([campaign.plan] "
        "looks), which stops by itself when it can tell; seeds added to this one are judged by a stricter test, whose "
        f"fewest are {added} in all"
    )


def beforehand(study: Study) -> str:
    """Return a warning while runs are missing, if no result of all the requested ones could be a verdict."""
    requested = min((each.num_runs for each in study.conditions), default=0)
    few = (each for each in study.comparisons if len(each.seeds) < requested < each.least_seeds and _is_fixed(each))
    first = next(few, None)
    if not study.campaign or first is None or first.looks is None:
        return ""
    reach = reach_of(first.looks.design, num_seeds=requested, comparisons=first.num_comparisons, alpha=first.alpha)
    return " ".join(reach_sentences(reach))


def _is_fixed(comparison: Comparison) -> bool:
    """True if the number of seeds was fixed beforehand: neither looks nor added seeds decide."""
    return comparison.looks is not None and comparison.looks.design in (Design.FIXED, Design.UNPAIRED)


def probability(p: float | None) -> str:
    if p is None:
        return "—"
    return f"{p:.2g}" if p >= 1e-4 else f"{p:.0e}"


def runs_sentence(study: Study) -> str:
    compared = sum(len(each.seeds) for each in study.conditions)
    requested = sum(each.num_runs for each in study.conditions)
    others = Counter(each.reason for each in study.left_out)
    left_out = "".join(f", {count} left out ({reason})" for reason, count in others.most_common())
    return f"{len(study.conditions)} conditions, {requested} runs: {compared} compared{left_out}"


def budget_sentence(study: Study) -> str:
    cut = f"Cut at {study.budget:,.6g} {study.align}"
    if study.shortest:
        more = f" and {len(study.shortest) - 1} more" if len(study.shortest) > 1 else ""
        return f"{cut}: the end of {study.shortest[0]}{more}"
    return cut + (", which every compared run has" if study.align is Align.STEPS else " of every compared run")


def metric_sentence(study: Study) -> str:
    planned = f", plan {study.plan.sha256[:12]}" if study.plan else ""
    return f"Decides: {study.metric}, {study.direction} is better, alpha {study.alpha:g}{planned}"


def standing(study: Study) -> str:
    looks = recorded_looks(study.looks)
    also = f"; {looks}" if looks else ""
    if not study.exploratory:
        head = f"As planned, but unverified, since {UNVERIFIED}" if study.is_unverified else "As planned"
        return (f"{head}: {study.plan.hypothesis}" if study.plan else head) + also
    return "Exploratory: " + "; ".join(study.exploratory) + also


def differing(study: Study) -> list[str]:
    told = []
    if study.samplers:
        told.append(
            f"the samplers differ ({', '.join(study.samplers)}), so {study.metric.field} is of other prompts in each "
            "condition: a verdict on it is no verdict on the policies; compare a held-out rate"
        )
    told += [f"differs in more than its condition says: {line}" for line in study.undeclared[:MOST_DIFFERING]]
    if len(study.undeclared) > MOST_DIFFERING:
        told.append(f"and {len(study.undeclared) - MOST_DIFFERING} more differences: --json has all of them")
    if study.unknown:
        runs = counted(study.unknown, "run")
        told.append(f"{runs} recorded no code and data, as earlier versions did not: whether these differ is unknown")
    return told


def on_record(study: Study) -> list[str]:
    told = [f"ledger: {line}" for line in study.notices[:MOST_DIFFERING]]
    more = len(study.notices) - MOST_DIFFERING
    return [*told, f"and {more} more from the ledger: --json has all of them"] if more > 0 else told


def survivors(study: Study) -> list[str]:
    """Return a warning for each condition that lost runs: the remaining ones may be the luckier ones."""
    return [
        f"{each.label}: {len(each.seeds)} of {each.num_runs} runs are compared; those that ended early may be worse"
        for each in study.conditions
        if 0 < len(each.seeds) < each.num_runs
    ]


def _corrected(comparison: Comparison) -> str:
    return f" after Holm's correction over {comparison.num_comparisons}" if comparison.num_comparisons > 1 else ""


def _too_few(comparison: Comparison) -> str:
    num_seeds, least = len(comparison.seeds), f"{comparison.least_seeds} seeds are the least"
    if num_seeds < 2:
        return f"With {counted(num_seeds, 'seed')} in common nothing can be tested; {least} for any verdict."
    if comparison.looks and comparison.looks.design is not Design.FIXED:
        return f"With {num_seeds} seeds no result of this test could be a verdict; {least} for any verdict."
    smallest = f"the smallest possible p is {comparison.smallest_p:.2g}"
    if comparison.num_comparisons > 1:
        holm = min(1.0, comparison.num_comparisons * comparison.smallest_p)
        smallest += f" ({holm:.2g}{_corrected(comparison)})"
    if tied := comparison.per_seed.ties if comparison.per_seed else 0:
        seeds = "One seed is" if tied == 1 else f"{tied} seeds are"
        left = f"{seeds} tied (a difference of exactly 0), which leaves {num_seeds - tied} of {num_seeds} to tell by"
        return f"{left}: {smallest}; {comparison.least_seeds} seeds without ties are the least for any verdict."
    return f"With {num_seeds} seeds {smallest}, however large the difference; {least} for any verdict."


def _detectable(comparison: Comparison, metric: Metric) -> str:
    """Return the detectable difference as a range: the spread of so few seeds is itself known only roughly."""
    if comparison.detectable is None or (comparison.looks and comparison.looks.design is not Design.FIXED):
        return ""
    low, high = (comparison.detectable * factor for factor in spread_range(len(comparison.seeds)))
    if metric.is_rate and low >= 1.0:
        return ""
    least, most = (shown_difference(end, metric, signed=False).removesuffix(" pp") for end in (low, high))
    unit = " pp" if metric.is_rate else ""
    return (
        f"; studies of {len(comparison.seeds)} seeds find a true difference of {least} to {most}{unit} 4 times in 5 "
        "(a range, because so few seeds show their own spread only roughly)"
    )
