"""The comparison of `retrain compare`, with the same sentences."""

from __future__ import annotations

from collections import Counter
from typing import Any

from retrain.rooms.evidence.study.family import Comparison, Verdict
from retrain.rooms.evidence.study.metric import Metric
from retrain.rooms.evidence.study.study import Study
from retrain.rooms.insight.compare.sentences import (
    budget_sentence,
    differing,
    metric_sentence,
    runs_sentence,
    standing,
    survivors,
)
from retrain.rooms.insight.compare.tables import comparison_table, condition_tables
from retrain.rooms.insight.compare.verdict_line import further_lines, verdict_line
from retrain.rooms.insight.report.gather import Material
from retrain.rooms.insight.report.markup import details, note, plot, section, table
from retrain.rooms.insight.report.text import plain, plural, text

MARKS = {Verdict.BETTER: "▲", Verdict.WORSE: "▼", Verdict.PRACTICALLY_SAME: "≈", Verdict.CANNOT_TELL: "●"}
KINDS = {
    Verdict.BETTER: "better",
    Verdict.WORSE: "worse",
    Verdict.PRACTICALLY_SAME: "same",
    Verdict.CANNOT_TELL: "open",
}
MOST_EXPLAINED = 12


def verdict_section(material: Material, number: int) -> tuple[str, dict[str, Any] | None]:
    """The section, and the figure of differences if there is one; `number` is its number."""
    study = material.study
    if study is None:
        return section("verdict", "Verdict", note(f"Nothing can be compared: {material.no_study}.")), None
    if not study.comparisons:
        body = note("Only one condition: there is nothing to compare it with.") if len(material.runs) > 1 else ""
        return section("verdict", "Results", body, *_estimates(study)), None
    figure = _figure(study)
    parts = [
        f'<p class="lede">{text(headline(study))}</p>',
        *(note(line) for line in (metric_sentence(study), runs_sentence(study), budget_sentence(study))),
        f'<p class="note strong">{text(standing(study), 2000)}</p>',
        *(note(line) for line in [*differing(study), *survivors(study)[:MOST_EXPLAINED]]),
        _comparisons(study),
        _explanations(study),
        plot(
            number,
            "Difference to the baseline",
            "with intervals",
            "",
            kind="forest",
        )
        if figure
        else "",
        *_estimates(study),
    ]
    return section("verdict", "Verdict", *parts), figure


def headline(study: Study) -> str:
    """The verdicts in a sentence."""
    verdicts = {each.verdict for each in study.comparisons}
    if len(study.comparisons) <= 4 and (len(verdicts) > 1 or len(study.comparisons) == 1):
        return (
            "; ".join(f"{each.condition} against {each.baseline}: {each.verdict}" for each in study.comparisons) + "."
        )
    counts = Counter(each.verdict for each in study.comparisons)
    summary = ", ".join(f"{counts[verdict]:,} {verdict}" for verdict in Verdict if counts[verdict])
    against = f"against {study.baseline}" if len({each.baseline for each in study.comparisons}) == 1 else "in pairs"
    return f"{plural(len(study.comparisons), 'comparison')} {against}: {summary}."


def pill(verdict: Verdict) -> str:
    """A verdict as text, symbol and colour."""
    return f'<span class="pill {KINDS[verdict]}"><span aria-hidden="true">{MARKS[verdict]}</span> {verdict}</span>'


def _comparisons(study: Study) -> str:
    found = comparison_table(study)
    rows = [
        (*(text(cell) for cell in row[:-1]), pill(each.verdict))
        for row, each in zip(found.rows, study.comparisons, strict=True)
    ]
    return table(f"Comparisons on {found.title}", found.heads, rows, num_names=found.num_names)


def _explanations(study: Study) -> str:
    def line(each: Comparison) -> str:
        why = "".join(f"<br>{text(line, 2000)}" for line in further_lines(each, study))
        return f"<li><b>{text(each.condition)}</b>: {text(verdict_line(each, study), 2000)}{why}</li>"

    lines = [line(each) for each in study.comparisons]
    if len(lines) <= MOST_EXPLAINED:
        return f'<ul class="why">{"".join(lines)}</ul>'
    return details("Why, comparison by comparison", f'<ul class="why">{"".join(lines)}</ul>')


def _estimates(study: Study) -> list[str]:
    tables = [
        table(
            f"{found.title}: mean and 95 % interval over seeds",
            found.heads,
            [tuple(map(text, row)) for row in found.rows],
        )
        for found in condition_tables(study)
    ]
    return tables[:1] + ([details("More metrics", "\n".join(tables[1:]))] if tables[1:] else [])


def _figure(study: Study) -> dict[str, Any] | None:
    """Differences with their intervals, the largest at the top."""
    known = [each for each in study.comparisons if each.difference is not None and each.interval is not None]
    if not known:
        return None
    known.sort(key=lambda each: each.difference or 0.0)
    scale = 100.0 if study.metric.is_rate else 1.0
    several = len({each.baseline for each in known}) > 1
    return {
        "kind": "forest",
        "unit": _axis(study.metric),
        "labels": [plain(f"{each.condition} − {each.baseline}" if several else each.condition, 80) for each in known],
        "values": [scale * (each.difference or 0.0) for each in known],
        "low": [scale * each.interval[0] for each in known if each.interval],
        "high": [scale * each.interval[1] for each in known if each.interval],
        "verdicts": [KINDS[each.verdict] for each in known],
    }


def _axis(metric: Metric) -> str:
    return f"difference in {plain(metric)}" + (", percentage points" if metric.is_rate else "")
