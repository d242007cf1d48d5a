"""Words for the numbers of a comparison: differences, intervals, levels, scopes and worst seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable

from retrain.records.runs.metric import Metric, shown, shown_difference
from retrain.text.amounts import counted
from retrain.verdicts.study.comparison import Comparison, Verdict
from retrain.verdicts.study.study import Study
from retrain.verdicts.study.two_policies import TwoPolicies

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
    """`too few seeds for a verdict (3; 6 are the fewest). All 3 were better, +21.6 pp on average; likely between`..."""
    num_seeds, looks = len(comparison.seeds), comparison.looks
    least = f"{comparison.least_seeds} are the fewest"
    if looks and looks.next_look:
        least = f"the next look is at {looks.next_look}"
    told = f"too few seeds for a verdict ({num_seeds}; {least})"
    if comparison.difference is None or comparison.per_seed is None:
        return told
    wins, few = comparison.per_seed.wins, comparison.few_seeds
    counted = f"{wins} of {num_seeds} {'was' if wins == 1 else 'were'}"
    if wins == num_seeds > 1:
        counted = "Both were" if num_seeds == 2 else f"All {num_seeds} were"
    told = f"{told}. {counted} better, {shown_difference(comparison.difference, study.metric)} on average"
    if few is None:
        return f"{told}, {over_seeds(num_seeds)}, on {scope(study)}; {UNBOUNDED}"
    low, high = (_bare(end, study.metric) for end in few.interval)
    where = "examples like these" if few.is_of_examples else scope(study)
    estimate = f"an estimate, {percent(few.level)} if seeds are roughly normal"
    return f"{told}; likely between {low} and {high} ({estimate}), {over_seeds(num_seeds)}, on {where}"


def policies_sentence(found: TwoPolicies) -> str:
    clusters = f" of {found.num_clusters:,} sources" if found.num_clusters < found.num_examples else ""
    size = sized(found.difference, found.interval, found.level, found.metric)
    return (
        f"{found.second} against {found.first}, these two policies: "
        f"{size} for other examples like these {found.num_examples:,}{clusters}, paired by example; it says nothing "
        "about how they were trained, which takes several seeds"
    )


def verdict_words(comparison: Comparison) -> str:
    """Return the verdict, with a condition where the line with lost runs at their worst does not confirm it."""
    lost, is_found = comparison.lost, comparison.verdict in (Verdict.BETTER, Verdict.WORSE)
    if is_found and lost and lost.difference is not None and not lost.survives:
        return f"{comparison.verdict}, unless lost runs were bad"
    return str(comparison.verdict)


def scope(study: Study) -> str:
    if not study.metric.is_eval:
        return "the prompts of training"
    if study.other_examples:
        return "different held-out examples"
    return f"these {study.num_examples:,} examples" if study.num_examples else "these held-out examples"


def over_seeds(count: int) -> str:
    return f"over {counted(count, 'seed')}"


def _bare(value: float, metric: Metric) -> str:
    """Round percentage points to a tenth, but never to `0.0`: on which side of zero a limit lies decides."""
    if not metric.is_rate:
        return f"{value:.4g}"
    points = 100 * value
    return f"{points:.1f}" if abs(points) >= 0.05 or not points else f"{points:.1g}"
