"""How numbers of a comparison are said: differences, intervals, levels, scopes and worst seeds."""

from __future__ import annotations

import math

from retrain.rooms.evidence.runs.metric import Metric, shown, shown_difference
from retrain.rooms.evidence.study.comparison import Comparison
from retrain.rooms.evidence.study.study import Study

NO_LIMIT = "no limit"


def percent(level: float) -> str:
    """A level as `95 %` or `98.75 %`."""
    return f"{100 * level:.4g} %"


def level_words(study: Study) -> str:
    """The level of the intervals, as `95 %`; a range where they have several."""
    levels = sorted({each.level for each in study.comparisons}) or [1.0 - study.alpha]
    ends = dict.fromkeys(percent(level) for level in (levels[0], levels[-1]))
    return " to ".join(ends)


def limits(interval: tuple[float, float], metric: Metric) -> str:
    """`6.1 to 17.2`; an infinite limit in words: `at least 6.1, no upper limit`."""
    low, high = interval
    if math.isinf(low) and math.isinf(high):
        return "no limit on either side"
    if math.isinf(high):
        return f"at least {_bare(low, metric)}, no upper limit"
    if math.isinf(low):
        return f"at most {_bare(high, metric)}, no lower limit"
    return f"{_bare(low, metric)} to {_bare(high, metric)}"


def bracketed(interval: tuple[float, float] | None, metric: Metric) -> str:
    """`[+6.1, +17.2]` for the cell of a table, `[no limit]` where both ends are infinite; empty without one."""
    if interval is None:
        return ""
    if all(map(math.isinf, interval)):
        return f" [{NO_LIMIT}]"
    return " [{}, {}]".format(*(_signed(end, metric) if math.isfinite(end) else NO_LIMIT for end in interval))


def sized(difference: float, interval: tuple[float, float] | None, level: float, metric: Metric) -> str:
    """`+11.7 pp (95 % interval 6.1 to 17.2)`: a difference is never said without how well it is known."""
    size = shown_difference(difference, metric)
    if interval is None:
        return f"{size} (no interval)"
    colon = ":" if any(map(math.isinf, interval)) else ""
    return f"{size} ({percent(level)} interval{colon} {limits(interval, metric)})"


def scope(study: Study) -> str:
    """The examples behind a difference: `these 64 examples`, or `the prompts of training`."""
    if not study.metric.is_eval:
        return "the prompts of training"
    if study.other_examples:
        return "different held-out examples"
    return f"these {study.num_examples:,} examples" if study.num_examples else "these held-out examples"


def over_seeds(count: int) -> str:
    """`over 8 seeds`."""
    return f"over {count} seed{'' if count == 1 else 's'}"


def worst_seeds(comparison: Comparison, study: Study) -> str:
    """`Worst seed of each: grpo+none 71.1%, maxrl+none 80.5%`; empty without a common seed."""
    if comparison.per_seed is None:
        return ""
    worst = (comparison.per_seed.worst_baseline, comparison.per_seed.worst_condition)
    left, right = (shown(value, study.metric) for value in worst)
    return f"Worst seed of each: {comparison.baseline} {left}, {comparison.condition} {right}"


def _bare(value: float, metric: Metric) -> str:
    return _digits(100 * value) if metric.is_rate else f"{value:.4g}"


def _signed(value: float, metric: Metric) -> str:
    return f"{'+' if value > 0 else ''}{_bare(value, metric)}"


def _digits(points: float) -> str:
    """Percentage points to a tenth, but what is not zero never as `0.0`: on which side of it a limit lies decides."""
    return f"{points:.1f}" if abs(points) >= 0.05 or not points else f"{points:.1g}"
