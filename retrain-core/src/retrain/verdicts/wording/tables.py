"""The tables of a comparison, and those of `--sets`, as rows of text, independent of the output format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from retrain.records.runs.metric import PASS_PREFIX, Metric, shown, shown_difference
from retrain.text.amounts import ABSENT
from retrain.verdicts.study.comparison import Comparison
from retrain.verdicts.study.sets import Aggregate, SetsView
from retrain.verdicts.study.study import Study
from retrain.verdicts.study.summaries import Estimate
from retrain.verdicts.wording.sentences import probability
from retrain.verdicts.wording.words import bracketed, percent


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """Column heads and rows of cells; the first `num_names` columns hold names, the others numbers."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_names: int = 1


def condition_tables(study: Study) -> Iterator[TextTable]:
    """Mean and 95 % interval of each metric by condition: a table per field, the deciding one first; one for pass@k."""
    by_title: dict[str, list[Metric]] = {}
    for metric in study.metrics:
        title = "held-out pass@k" if metric.field.startswith(PASS_PREFIX) else metric.field
        by_title.setdefault(title, []).append(metric)
    deciding_first = sorted(by_title.items(), key=lambda item: study.metric not in item[1])
    for title, metrics in deciding_first:
        heads = [_head(metric, in_group=title != metric.field) for metric in metrics]
        rows = tuple(
            (
                each.label + (" (baseline)" if each.label == study.baseline else ""),
                f"{len(each.seeds)}/{each.num_runs}",
                *(_estimate(each.estimates[str(metric)], metric) for metric in metrics),
            )
            for each in study.conditions
        )
        yield TextTable(title=title, heads=("condition", "seeds", *heads), rows=rows)


def comparison_table(study: Study) -> TextTable:
    """Every comparison with its verdict."""
    heads = ("condition", "against", "seeds", "difference [interval]", "level", "p", "p Holm", "verdict")
    rows = tuple(
        (
            each.condition,
            each.baseline,
            str(len(each.seeds)),
            f"{shown_difference(each.difference, study.metric)}{bracketed(each.interval, study.metric)}",
            percent(each.level),
            probability(each.p),
            probability(each.p_holm),
            each.verdict.value,
        )
        for each in study.comparisons
    )
    return TextTable(title=str(study.metric), heads=heads, rows=rows, num_names=2)


def _head(metric: Metric, *, in_group: bool) -> str:
    return f"pass@{metric.field.removeprefix(PASS_PREFIX)}" if in_group else metric.summary.value


def _estimate(estimate: Estimate, metric: Metric) -> str:
    mean = shown(estimate.mean, metric)
    if estimate.interval is None:
        return mean
    low, high = (shown(end, metric).removesuffix("%") for end in estimate.interval)
    return f"{mean} [{low}, {high}]"


OVER_ALL = "mean over sets"


def sets_tables(study: Study) -> Iterator[TextTable]:
    """The conditions over all sets, then every verdict; none unless the study compares sets."""
    if study.sets is None:
        return
    yield _conditions(study.sets)
    if study.sets.comparisons:
        yield _verdicts(study.sets)


def sets_notes(study: Study) -> Iterator[str]:
    """What the tables cannot say."""
    if study.sets is None:
        return
    planned = f", since the plan names {study.metric} alone" if study.plan else ""
    family = f"{study.sets.num_comparisons} comparisons in one family (Holm), over seeds, on the examples of these sets"
    least = max((each.overall.least_seeds for each in study.sets.comparisons), default=0)
    yield f"--sets: {family}; {least} seeds are the least for a verdict in it; exploratory{planned}"
    yield "IQM and optimality gap: bootstrap intervals of so few runs cover less than 95 %; no verdict uses them"


def _conditions(view: SetsView) -> TextTable:
    metric = view.metrics[0]
    heads = ("condition", "seeds", OVER_ALL, "IQM", "optimality gap", *view.names)
    rows = tuple(
        (
            each.condition,
            str(len(each.seeds)),
            _aggregate(each.mean, view),
            _aggregate(each.iqm, view),
            _aggregate(each.gap, view) if each.gap else ABSENT,
            *(shown(mean, metric) for mean in each.set_means),
        )
        for each in view.conditions
    )
    return TextTable(title=f"{len(view.names)} evaluation sets [95 % interval]", heads=heads, rows=rows)


def _verdicts(view: SetsView) -> TextTable:
    rows = tuple(
        row
        for each in view.comparisons
        for name, found in zip((OVER_ALL, *view.names), (each.overall, *each.per_set), strict=True)
        for row in [_row(found, name, view)]
    )
    heads = (
        "condition",
        "against",
        "set",
        "seeds",
        f"difference [{_levels(view)} interval]",
        "p Holm",
        "verdict",
    )
    return TextTable(title="Verdicts over sets", heads=heads, rows=rows, num_names=3)


def _row(found: Comparison, name: str, view: SetsView) -> tuple[str, ...]:
    metric = view.metrics[0]
    return (
        found.condition,
        found.baseline,
        name,
        str(len(found.seeds)),
        f"{shown_difference(found.difference, metric)}{bracketed(found.interval, metric)}",
        probability(found.p_holm),
        found.verdict.value,
    )


def _levels(view: SetsView) -> str:
    """The level of the intervals, or the range of those of Holm's steps."""
    found = sorted({each.level for pair in view.comparisons for each in (pair.overall, *pair.per_set)})
    return " to ".join(dict.fromkeys(percent(level) for level in (found[0], found[-1])))


def _aggregate(found: Aggregate, view: SetsView) -> str:
    metric = view.metrics[0]
    if found.interval is None:
        return shown(found.value, metric)
    low, high = (shown(limit, metric).removesuffix("%") for limit in found.interval)
    return f"{shown(found.value, metric)} [{low}, {high}]"
