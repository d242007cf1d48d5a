"""Sentences about the second scope of a verdict: examples like the held-out ones."""

from __future__ import annotations

import math

from retrain.records.runs.metric import Metric, shown_difference
from retrain.verdicts.stats.components import MOST, Foreseen, Needed
from retrain.verdicts.study.advice import Advice, Way
from retrain.verdicts.study.comparison import ExamplesView
from retrain.verdicts.wording.words import sized

JUDGED = "seeds that no plan foresaw are judged by a stricter test"


def scope_sentence(view: ExamplesView, metric: Metric) -> str:
    """`on examples like these: +11.7 pp (95 % interval 1.9 to 21.5)`, or why that cannot be told."""
    head = "on examples like these"
    if view.interval is None or view.estimate is None or view.level is None:
        return f"{head}: cannot be told, since {view.reason}"
    if view.num_clusters < view.num_examples:
        head += f" from other sources (these are of {view.num_clusters})"
    return f"{head}: {sized(view.estimate, view.interval, view.level, metric)}"


def example_lines(view: ExamplesView | None, metric: Metric) -> list[str]:
    """What is below a verdict's line: why there is no second scope, and the advice."""
    if view is None:
        return []
    return [scope_sentence(view, metric) if view.interval is None else "", advice_sentence(view, metric)]


def advice_sentence(view: ExamplesView, metric: Metric) -> str:
    """What doubling seeds or examples would do to the interval, and how many would tell; empty without advice."""
    advice = view.advice
    if advice is None:
        return ""
    told = [_doubled(view, advice, metric), _needed(view, advice, metric)]
    if advice.cheaper is not None and advice.cost is not None:
        cost = f"measured: {_seconds(advice.cost.seed_s)} for a seed, {_seconds(advice.cost.example_s)} for an example"
        told.append(f"more {advice.cheaper} are the cheaper way ({cost})")
    return "; ".join([*told, JUDGED])


def _doubled(view: ExamplesView, advice: Advice, metric: Metric) -> str:
    """What twice the seeds or examples would make of the interval; over few seeds it may have no limit yet."""
    if math.isinf(advice.half_width):
        return f"{view.num_seeds} seeds are too few to bound it on examples like these, whatever the examples"
    today = shown_difference(advice.half_width, metric, signed=False)
    return (
        f"what would narrow ± {today} on examples like these: {2 * view.num_seeds} seeds, to about "
        f"{_half(advice.twice_seeds, metric)}, or {2 * view.num_examples} examples, to "
        f"{_half(advice.twice_examples, metric)}"
    )


def _needed(view: ExamplesView, advice: Advice, metric: Metric) -> str:
    ways = ((Way.SEEDS, advice.seeds), (Way.EXAMPLES, advice.examples))
    if told := [f"{_number(needed)} {way}" for way, needed in ways if advice.is_clear(way)]:
        difference = shown_difference(view.estimate, metric)
        return f"if the true difference is {difference}, it would be found 4 times in 5 with {' or '.join(told)}"
    ranges = ", ".join(f"{_range(needed)} {way}" for way, needed in ways)
    return f"how many would tell cannot be said from {view.num_seeds} seeds (80 %: {ranges})"


def _half(foreseen: Foreseen, metric: Metric) -> str:
    low, high = (shown_difference(end, metric, signed=False).removesuffix(" pp") for end in foreseen.interval)
    return f"± {shown_difference(foreseen.half_width, metric, signed=False)} (80 %: {low} to {high})"


def _number(needed: Needed) -> str:
    number = f"{needed.number:,}" if needed.number is not None else f"more than {MOST:,}"
    return f"{number} (80 %: {_range(needed)})"


def _range(needed: Needed) -> str:
    low, high = (f"more than {MOST:,}" if end is None else f"{end:,}" for end in needed.interval)
    return low if low == high else f"{low} to {high}"


def _seconds(cost_s: float) -> str:
    return f"{cost_s:,.0f} s" if cost_s >= 10 else f"{cost_s:.2g} s"
