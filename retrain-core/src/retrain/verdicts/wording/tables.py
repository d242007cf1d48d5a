"""The tables of a comparison, and those of `--sets`, as rows of text, independent of the output format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from retrain.records.runs.metric import PASS_PREFIX, Metric, shown, shown_difference
from retrain.text.amounts import ABSENT
from retrain.verdicts.study.sets import SetsView
from retrain.verdicts.study.study import Study
from retrain.verdicts.wording.sentences import probability
from retrain.verdicts.wording.words import bracketed, level_words, percent, with_interval

PASSES = "held-out pass@k"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """Column heads and rows of cells; the first `num_names` columns hold names, the others numbers."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_names: int = 1


def condition_tables(study: Study) -> Iterator[TextTable]:
    """Yield mean and 95 % interval of each metric by condition: a table per field, the deciding one first."""
    by_title: dict[str, list[Metric]] = {}
    for metric in study.metrics:
        by_title.setdefault(PASSES if metric.field.startswith(PASS_PREFIX) else metric.field, []).append(metric)
    deciding_first = sorted(by_title.items(), key=lambda item: study.metric not in item[1])
    for title, metrics in deciding_first:
        heads = [
            f"pass@{each.field.removeprefix(PASS_PREFIX)}" if title == PASSES else each.summary.value
            for each in metrics
        ]
        rows = []
        for each in study.conditions:
            label = each.label + (" (baseline)" if each.label == study.baseline else "")
            found = [(each.estimates[str(metric)], metric) for metric in metrics]
            cells = [with_interval(estimate.mean, estimate.interval, metric) for estimate, metric in found]
            rows.append((label, f"{len(each.seeds)}/{each.num_runs}", *cells))
        yield TextTable(title=title, heads=("condition", "seeds", *heads), rows=tuple(rows))


def comparison_table(study: Study) -> TextTable:
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


OVER_ALL = "mean over sets"


def sets_tables(study: Study) -> Iterator[TextTable]:
    if study.sets is None:
        return
    yield _conditions(study.sets)
    if study.sets.comparisons:
        yield _verdicts(study.sets)


def sets_notes(study: Study) -> Iterator[str]:
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
            with_interval(each.mean.value, each.mean.interval, metric),
            with_interval(each.iqm.value, each.iqm.interval, metric),
            with_interval(each.gap.value, each.gap.interval, metric) if each.gap else ABSENT,
            *(shown(mean, metric) for mean in each.set_means),
        )
        for each in view.conditions
    )
    return TextTable(title=f"{len(view.names)} evaluation sets [95 % interval]", heads=heads, rows=rows)


def _verdicts(view: SetsView) -> TextTable:
    found = [
        (name, each)
        for pair in view.comparisons
        for name, each in zip((OVER_ALL, *view.names), (pair.overall, *pair.per_set), strict=True)
    ]
    level, metric = level_words(each for _, each in found), view.metrics[0]
    heads = ("condition", "against", "set", "seeds", f"difference [{level} interval]", "p Holm", "verdict")
    rows = tuple(
        (
            each.condition,
            each.baseline,
            name,
            str(len(each.seeds)),
            f"{shown_difference(each.difference, metric)}{bracketed(each.interval, metric)}",
            probability(each.p_holm),
            each.verdict.value,
        )
        for name, each in found
    )
    return TextTable(title="Verdicts over sets", heads=heads, rows=rows, num_names=3)
