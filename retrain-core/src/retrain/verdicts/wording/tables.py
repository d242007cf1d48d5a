"""The tables of a comparison as rows of text, independent of the output format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from retrain.records.runs.metric import PASS_PREFIX, Metric, shown, shown_difference
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
