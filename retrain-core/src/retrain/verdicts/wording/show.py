"""Renders a comparison for a terminal, as Markdown and as JSON; its tables are rows of text, whatever the format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from retrain.records.runs.curves import PASS_PREFIX, Metric, shown, shown_difference
from retrain.text.amounts import ABSENT
from retrain.text.tables import escaped, markdown_table, rich_table
from retrain.text.terminal_text import printable
from retrain.verdicts.ledger.chain import plain_data
from retrain.verdicts.study.comparison import Verdict
from retrain.verdicts.study.sensitivity import rate_by_rate_sentence, sensitivity_sentence
from retrain.verdicts.study.sets import SetsView
from retrain.verdicts.study.study import Study
from retrain.verdicts.wording import sentences
from retrain.verdicts.wording.sentences import bracketed, explanation, level_words, percent, probability, with_interval
from retrain.verdicts.wording.verdict_line import answer, collapse_sentences, further_lines, verdict_line

COLOURS = {
    Verdict.BETTER.value: "green",
    Verdict.WORSE.value: "red",
    Verdict.PRACTICALLY_SAME.value: "blue",
    Verdict.CANNOT_TELL.value: "yellow",
}
MOST_LINES = 20
VERDICTS = "Verdicts"


def picture(study: Study) -> RenderableType:
    parts: list[RenderableType] = [Text(printable(answer(study)), style="bold"), Text()]
    parts += [Text(printable(line), style="" if i else "bold") for i, line in enumerate(_heads(study))]
    for title, table in _tables(study):
        rows = ([Text(printable(cell), style=COLOURS.get(cell, "")) for cell in row] for row in table.rows)
        drawn = rich_table(table.heads, rows, num_names=table.num_names)
        parts += [Text(), Text(printable(title), style="bold"), drawn]
        for line, further in _reasons(study) if title == VERDICTS else ():
            parts += [Text(), Text(printable(line)), *(Text(printable(f"  {each}")) for each in further)]
    notes = list(_notes(study))
    return Group(*parts, *([Text()] if notes else []), *(Text(printable(note), style="yellow") for note in notes))


def markdown(study: Study) -> str:
    title, *heads = map(escaped, _heads(study))
    lines = [f"**{escaped(answer(study))}**", "", f"## {title}", *(f"{each}  " for each in heads)]
    for title, table in _tables(study):
        rows = [list(map(escaped, row)) for row in table.rows]
        lines += ["", f"### {escaped(title)}", "", *markdown_table(table.heads, rows, num_names=table.num_names)]
        for i, (line, further) in enumerate(_reasons(study) if title == VERDICTS else ()):
            lines += [*([] if i else [""]), f"- {escaped(line)}", *(f"  - {escaped(each)}" for each in further)]
    notes = list(_notes(study))
    return "\n".join([*lines, *([""] if notes else []), *(f"- {escaped(note)}" for note in notes)])


def _heads(study: Study) -> list[str]:
    title = f"Comparison of {study.campaign}" if study.campaign else "Comparison"
    parts = (sentences.runs_sentence, sentences.budget_sentence, sentences.metric_sentence, sentences.standing)
    return [title, *(part(study) for part in parts)]


def _tables(study: Study) -> Iterator[tuple[str, TextTable]]:
    yield from ((each.title, each) for each in condition_tables(study))
    if study.comparisons:
        yield VERDICTS, comparison_table(study)
    yield from ((each.title, each) for each in (*sets_tables(study), *tuning_tables(study)))


def _reasons(study: Study) -> Iterator[tuple[str, Sequence[str]]]:
    for each in study.comparisons[:MOST_LINES]:
        against = f" against {each.baseline}" if each.baseline != study.baseline else ""
        yield f"{each.condition}{against}: {verdict_line(each, study)}", further_lines(each, study)
    if len(study.comparisons) > MOST_LINES:
        yield f"and {len(study.comparisons) - MOST_LINES} more: --json has all of them", ()


def _notes(study: Study) -> Iterator[str]:
    yield from sentences.differing(study)
    yield from sentences.on_record(study)
    yield from sentences.survivors(study)
    yield from collapse_sentences(study)
    yield from (sensitivity_sentence(each, study.metric) for each in study.sensitivity)
    yield from (rate_by_rate_sentence(each, study.metric) for each in study.rate_by_rate)
    yield from filter(None, (sentences.beforehand(study), sentences.next_step(study)))
    yield from sets_notes(study)
    yield from tuning_notes(study)
    yield from sentences.capped([f"left out: {each.name}: {each.reason}" for each in study.left_out], "left out")


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
    view = study.sets
    if view is None:
        return
    metric, kind = view.metrics[0], "tasks" if view.tasks == view.names else "evaluation sets"
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
    yield TextTable(title=f"{len(view.names)} {kind} [95 % interval]", heads=heads, rows=rows)
    if view.comparisons:
        yield _verdicts(view)


def sets_notes(study: Study) -> Iterator[str]:
    if study.sets is None:
        return
    planned = f", since the plan names only {study.metric}" if study.plan else ""
    family = f"{study.sets.num_comparisons} comparisons in one family (Holm), over seeds, on the examples of these sets"
    least = max((each.overall.least_seeds for each in study.sets.comparisons), default=0)
    head = "tasks" if {*study.sets.tasks} == {*study.sets.names} else "--sets"
    yield f"{head}: {family}; {least} seeds are the least for a verdict in it; exploratory{planned}"
    yield "IQM and optimality gap: bootstrap intervals of so few runs cover less than 95 %; no verdict uses them"


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


def tuning_tables(study: Study) -> Iterator[TextTable]:
    """Yield performance against tuning budget: the expected best of k configurations."""
    view = study.tuning
    if view is None:
        return
    sizes = sorted({size for each in view.conditions for size in each.curve})
    rows = []
    for each in view.conditions:
        cells = (with_interval(*each.curve[size], view.metric) if size in each.curve else ABSENT for size in sizes)
        rows.append((each.condition, each.budget, str(each.num_tried), str(each.num_failed), *cells))
    heads = ("condition", "tuned", "tried", "failed", *(f"best of {size}" for size in sizes))
    title = f"Tuning: expected best of k configurations, {view.metric} of the tuning runs [95 % interval]"
    yield TextTable(title=title, heads=heads, rows=tuple(rows), num_names=2)


def tuning_notes(study: Study) -> Iterator[str]:
    if study.tuning:
        yield from (edge for each in study.tuning.conditions for edge in each.edges)
        yield "tuning: intervals of so few configurations cover less than 95 %; no verdict uses them"


AS_THEY_ARE = (
    *("direction", "alpha", "baseline", "align", "budget", "shortest", "standing", "exploratory", "undeclared"),
    *("notices", "collapses", "sets", "left_out", "campaign", "sensitivity", "rate_by_rate", "tuning"),
)
OF_THE_PLAN = ("hypothesis", "alpha", "stop_rule", "baseline", "direction", "margin", "written", "sha256")


def study_data(study: Study) -> dict[str, Any]:
    """Return the documented JSON: numbers that do not exist are null, never NaN."""
    looks = study.looks
    data: dict[str, Any] = {"answer": answer(study), "metric": str(study.metric)}
    data |= {name: plain_data(getattr(study, name)) for name in AS_THEY_ARE}
    return data | {
        "unknown_inputs": study.unknown,
        "shopping": looks
        and {
            "looks": len(looks.looks),
            "metrics": list(looks.metrics),
            "choices": looks.num_choices,
            "registered_in": looks.registered_in or None,
        },
        "plan": study.plan
        and {
            **{name: plain_data(getattr(study.plan, name)) for name in OF_THE_PLAN},
            "primary_metric": str(study.plan.metric) if study.plan.metric else None,
            "intact": study.plan.is_intact,
        },
        "conditions": [
            {
                "condition": each.label,
                "seeds": list(each.seeds),
                "num_runs": each.num_runs,
                "metrics": plain_data(each.estimates),
            }
            for each in study.conditions
        ],
        "comparisons": [
            plain_data(each) | {"line": verdict_line(each, study), "explanation": explanation(each, study)}
            for each in study.comparisons
        ],
        "two_runs": study.two_runs and plain_data(study.two_runs) | {"metric": str(study.metric)},
    }
