"""The tables of `--sets`: every condition over all evaluation sets, and the family of verdicts on them."""

from __future__ import annotations

from collections.abc import Iterator

from retrain.records.runs.metric import ABSENT, shown, shown_difference
from retrain.verdicts.study.comparison import Comparison
from retrain.verdicts.study.sets import Aggregate, SetsView
from retrain.verdicts.study.study import Study
from retrain.verdicts.wording.sentences import probability
from retrain.verdicts.wording.tables import TextTable
from retrain.verdicts.wording.words import bracketed, percent

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
