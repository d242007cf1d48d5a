"""Sentences about a comparison, the same for terminal, Markdown and JSON, and the words for its numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from retrain.records.runs.curves import Metric, shown, shown_difference
from retrain.text.amounts import counted
from retrain.verdicts.stats.paired import spread_range
from retrain.verdicts.stats.sequential import fewest_equal
from retrain.verdicts.study.comparison import Comparison, Design, Verdict, VerdictReason
from retrain.verdicts.study.examples import TwoPolicies
from retrain.verdicts.study.looks import reach_of, reach_sentences
from retrain.verdicts.study.safeguards import controls_sentence
from retrain.verdicts.study.study import Study

MOST_LINES = 20
MACRO = "macro: each task counts the same"
UNVERIFIED = "no ledger here has the plan and every run"


def explanation(comparison: Comparison, study: Study) -> str:
    """Return the reason for the verdict: the corrected p, and the least that these seeds could show."""
    p = f"p = {probability(comparison.p_holm)}{_corrected(comparison)}"
    match comparison.cause:
        case VerdictReason.FOUND:
            found = f"{p}, at most {comparison.alpha:g}: chance would rarely give such a difference."
            return f"{found} It is {controls_sentence(comparison, study.metric)}." if comparison.controls else found
        case VerdictReason.NOT_BEYOND_CONTROL:
            return f"{p}, but a gain counts only beyond training with useless rewards, or with none."
        case VerdictReason.WITHIN | VerdictReason.FOUND_WITHIN:
            margin = shown_difference(comparison.margin, study.metric, signed=False)
            inside = f"the interval lies inside the planned margin of ±{margin}."
            return inside if comparison.cause is VerdictReason.WITHIN else f"A difference is found, but {inside}"
        case VerdictReason.TOO_FEW:
            seeds, tied = counted(len(comparison.seeds), "seed"), comparison.per_seed.ties if comparison.per_seed else 0
            ties = f" ({tied} tied: a difference of exactly 0)" if tied else ""
            holm = min(1.0, comparison.num_comparisons * comparison.smallest_p)
            corrected = f" ({holm:.2g}{_corrected(comparison)})" if comparison.num_comparisons > 1 else ""
            return (
                f"With {seeds} in common{ties} the smallest possible p is {comparison.smallest_p:.2g}{corrected}; "
                f"{comparison.least_seeds} seeds are the least for any verdict."
            )
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
    return f"{cut} of every compared run"


def metric_sentence(study: Study) -> str:
    planned = f", plan {study.plan.sha256[:12]}" if study.plan else ""
    return f"Decides: {study.metric}, {study.direction} is better, alpha {study.alpha:g}{planned}"


def standing(study: Study) -> str:
    if study.exploratory:
        return f"Exploratory: {'; '.join(study.exploratory)}{looks_note(study)}"
    head = f"As planned, but unverified, since {UNVERIFIED}" if study.is_unverified else "As planned"
    return (f"{head}: {study.plan.hypothesis}" if study.plan else head) + looks_note(study)


def looks_note(study: Study) -> str:
    """Return `; 3 looks, at 2 metrics, with 3 choices of ...`; empty without a ledger."""
    if study.looks is None:
        return ""
    metrics, choices = len(study.looks.metrics), study.looks.num_choices
    parts = [counted(len(study.looks.looks), "look")]
    parts += [f"at {metrics} metrics"] if metrics > 1 else []
    parts += [f"with {choices} choices of metric, side, alpha, baseline and budget"] if choices > metrics else []
    plan = f"; plan registered in {study.looks.registered_in}" if study.looks.registered_in else ""
    return f"; {', '.join(parts)}{plan}"


def capped(lines: Sequence[str], of: str) -> list[str]:
    """Return the first lines, and how many more there are `of` a kind."""
    more = [f"and {len(lines) - MOST_LINES} more {of}: --json has all of them"] if len(lines) > MOST_LINES else []
    return [*lines[:MOST_LINES], *more]


def differing(study: Study) -> list[str]:
    told = []
    if study.samplers:
        told.append(
            f"the samplers differ ({', '.join(study.samplers)}), so {study.metric.field} is of other prompts in each "
            "condition: a verdict on it is no verdict on the policies; compare a held-out rate"
        )
    undeclared = [f"differs in more than its condition says: {line}" for line in study.undeclared]
    told += capped(undeclared, "differences")
    if study.unknown:
        runs = counted(study.unknown, "run")
        told.append(f"{runs} recorded no code and data, as earlier versions did not: whether these differ is unknown")
    return told


def on_record(study: Study) -> list[str]:
    return capped([f"ledger: {line}" for line in study.notices], "from the ledger")


def survivors(study: Study) -> list[str]:
    """Return a warning for each condition that lost runs: the remaining ones may be the luckier ones."""
    return [
        f"{each.label}: {len(each.seeds)} of {each.num_runs} runs are compared; those that ended early may be worse"
        for each in study.conditions
        if 0 < len(each.seeds) < each.num_runs
    ]


def _corrected(comparison: Comparison) -> str:
    return f" after Holm's correction over {comparison.num_comparisons}" if comparison.num_comparisons > 1 else ""


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


NO_LIMIT = "no limit"
UNBOUNDED = "too few seeds to bound it"


def percent(level: float) -> str:
    return f"{100 * level:.4g} %"


def level_words(comparisons: Iterable[Comparison]) -> str:
    levels = sorted({each.level for each in comparisons})
    return " to ".join(dict.fromkeys(percent(level) for level in (levels[0], levels[-1])))


def limits(interval: tuple[float, float], metric: Metric) -> str:
    """Return `6.1 to 17.2`; an infinite limit in words: `at least 6.1, no upper limit`."""
    low, high = interval
    if math.isinf(low) and math.isinf(high):
        return UNBOUNDED
    if math.isinf(high):
        return f"at least {_bare(low, metric)}, no upper limit"
    if math.isinf(low):
        return f"at most {_bare(high, metric)}, no lower limit"
    return f"{_bare(low, metric)} to {_bare(high, metric)}"


def with_interval(value: float | None, interval: tuple[float, float] | None, metric: Metric) -> str:
    """Return `41.2% [38.0, 44.5]` for the cell of a table."""
    if interval is None:
        return shown(value, metric)
    low, high = (shown(end, metric).removesuffix("%") for end in interval)
    return f"{shown(value, metric)} [{low}, {high}]"


def bracketed(interval: tuple[float, float] | None, metric: Metric) -> str:
    """Return `[+6.1, +17.2]` for the cell of a table, `[too few seeds]` where both ends are infinite."""
    if interval is None:
        return ""
    if all(map(math.isinf, interval)):
        return " [too few seeds]"
    signed = (f"{'+' if end > 0 else ''}{_bare(end, metric)}" if math.isfinite(end) else NO_LIMIT for end in interval)
    return f" [{', '.join(signed)}]"


def sized(difference: float | None, interval: tuple[float, float] | None, level: float, metric: Metric) -> str:
    """Return `+11.7 pp (95 % interval 6.1 to 17.2)`: a difference never appears without its uncertainty."""
    size = shown_difference(difference, metric)
    if interval is None:
        return f"{size} (no interval)"
    if all(map(math.isinf, interval)):
        return f"{size} ({UNBOUNDED})"
    colon = ":" if any(map(math.isinf, interval)) else ""
    return f"{size} ({percent(level)} interval{colon} {limits(interval, metric)})"


def too_few_seeds(comparison: Comparison, study: Study) -> str:
    """`too few seeds for a verdict (3; 6 are the fewest). Better in 3 of 3, +21.6 pp on average; likely between`..."""
    num_seeds, looks = len(comparison.seeds), comparison.looks
    least = f"{comparison.least_seeds} are the fewest"
    if looks and looks.next_look:
        least = f"the next look is at {looks.next_look}"
    told = f"too few seeds for a verdict ({num_seeds}; {least})"
    if comparison.difference is None or comparison.per_seed is None:
        return told
    size, few = shown_difference(comparison.difference, study.metric), comparison.few_seeds
    told = f"{told}. Better in {comparison.per_seed.wins} of {num_seeds}, {size} on average"
    if few is None:
        return f"{told}, over {counted(num_seeds, 'seed')}, on {scope(study)}; {UNBOUNDED}"
    low, high = (_bare(end, study.metric) for end in few.interval)
    where = "examples like these" if few.is_of_examples else scope(study)
    estimate = f"an estimate, {percent(few.level)} if seeds are roughly normal"
    return f"{told}; likely between {low} and {high} ({estimate}), over {counted(num_seeds, 'seed')}, on {where}"


def policies_sentence(found: TwoPolicies) -> str:
    clusters = f" of {found.num_clusters:,} sources" if found.num_clusters < found.num_examples else ""
    size = sized(found.difference, found.interval, found.level, found.metric)
    return (
        f"{found.second} against {found.first}, these two policies: "
        f"{size} for other examples like these {found.num_examples:,}{clusters}, paired by example; it says nothing "
        "about how they were trained: that takes several seeds"
    )


def verdict_words(comparison: Comparison) -> str:
    """Return the verdict, with a condition where the line with lost runs at their worst does not confirm it."""
    lost, is_found = comparison.lost, comparison.verdict in (Verdict.BETTER, Verdict.WORSE)
    if is_found and lost and lost.difference is not None and not lost.survives:
        return f"{comparison.verdict}, unless lost runs were bad"
    return str(comparison.verdict)


def scope(study: Study) -> str:
    if not study.metric.is_eval:
        return f"the prompts of training{of_tasks(study)}"
    if study.other_examples:
        return "different held-out examples"
    these = f"these {study.num_examples:,} examples" if study.num_examples else "these held-out examples"
    return f"{these}{of_tasks(study)}"


def of_tasks(study: Study) -> str:
    """Return ` of the tasks sums and products (macro: each task counts the same)`; empty for a single task."""
    tasks, field = study.sets.tasks if study.sets else (), study.metric.field
    how = "as sampled" if not study.metric.is_eval else "weighted" if "_weighted_" in field else MACRO
    of_one = any(field.startswith((f"eval_{task}_", f"task_{task}_")) for task in tasks)
    return f" of the tasks {', '.join(tasks[:-1])} and {tasks[-1]} ({how})" if tasks and not of_one else ""


def tasks_sentence(comparison: Comparison, study: Study) -> str:
    """Return `Better on sums (+9.1 pp), worse on products (-4.2 pp), corrected over ...`; empty without tasks."""
    if study.sets is None or not study.sets.tasks:
        return ""
    view, by_verdict = study.sets, dict[str, list[str]]()
    pairs = {(each.overall.baseline, each.overall.condition): each.per_set for each in view.comparisons}
    for name, each in zip(view.names, pairs[comparison.baseline, comparison.condition], strict=True):
        if name in view.tasks:
            size = shown_difference(each.difference, study.metric)
            by_verdict.setdefault(f"{each.verdict} on", []).append(f"{name} ({size})")
    text = ", ".join(f"{words} {' and '.join(names)}" for words, names in by_verdict.items())
    mixed = "; the mean over tasks hides a loss" if {"better on", "worse on"} <= by_verdict.keys() else ""
    return f"{text[0].upper()}{text[1:]}, corrected over {view.num_comparisons} comparisons (Holm){mixed}"


def _bare(value: float, metric: Metric) -> str:
    """Round percentage points to a tenth, but never to `0.0`: on which side of zero a limit lies decides."""
    if not metric.is_rate:
        return f"{value:.4g}"
    points = 100 * value
    return f"{points:.1f}" if abs(points) >= 0.05 or not points else f"{points:.1g}"
