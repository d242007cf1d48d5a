"""The comparison of `retrain compare`, with the same sentences, and in plain language at the top of the page."""

from __future__ import annotations

from typing import Any

from retrain.records.runs.metric import Metric
from retrain.report.gather import Material
from retrain.report.markup import details, note, plot, section, table
from retrain.report.text import text
from retrain.report.verdict_figures import KINDS, forest, profile, seed_plots
from retrain.verdicts.study.comparison import Comparison, Verdict
from retrain.verdicts.study.study import Study
from retrain.verdicts.wording import plainly
from retrain.verdicts.wording.answer import NOTHING, answer
from retrain.verdicts.wording.sentences import (
    budget_sentence,
    differing,
    metric_sentence,
    next_step,
    on_record,
    runs_sentence,
    standing,
    survivors,
)
from retrain.verdicts.wording.sets_tables import sets_notes, sets_tables
from retrain.verdicts.wording.tables import comparison_table, condition_tables
from retrain.verdicts.wording.typical_seed import collapse_sentences
from retrain.verdicts.wording.verdict_line import alarms, further_lines, verdict_line
from retrain.verdicts.wording.words import level_words

MARKS = {Verdict.BETTER: "▲", Verdict.WORSE: "▼", Verdict.PRACTICALLY_SAME: "≈", Verdict.CANNOT_TELL: "●"}
MOST_EXPLAINED = 12


def findings(material: Material) -> str:
    """What was found, for what and how sure, in words that need no statistics; empty if nothing is compared."""
    study = material.study
    if study is None or not study.comparisons:
        return ""
    lines = "".join(f"<p>{text(line, 2000)}</p>" for line in plainly.summary(study))
    return f'<div class="findings"><h3>In plain words</h3>{lines}</div>'


def verdict_section(material: Material, first_number: int) -> tuple[str, list[dict[str, Any]]]:
    """The section and its figures, numbered from `first_number`."""
    study = material.study
    if study is None:
        return section("verdict", "Verdict", note(f"Nothing can be compared: {material.no_study}.")), []
    if not study.comparisons:
        body = note(NOTHING) if len(material.runs) > 1 else ""
        return section("verdict", "Results", body, *_estimates(study)), []
    differences = forest(study)
    figures = [differences] if differences else []
    pairs, more = seed_plots(study, first_number + len(figures))
    sets, profiles = _sets(study, first_number + len(figures) + len(more))
    parts = [
        _ledger_alert(study),
        f'<p class="lede">{text(answer(study), 2000)}</p>',
        f'<p class="note strong">{text(standing(study), 2000)}</p>',
        *(note(line) for line in [*differing(study), *on_record(study), *survivors(study)[:MOST_EXPLAINED]]),
        *(note(line) for line in (metric_sentence(study), runs_sentence(study), budget_sentence(study))),
        _comparisons(study),
        _explanations(study),
        *(note(line) for line in [*collapse_sentences(study), next_step(study)] if line),
        _forest_plot(study, first_number) if differences else "",
        _pairs_part(pairs),
        sets,
        *_estimates(study),
    ]
    return section("verdict", "Verdict", *parts), [*figures, *more, *profiles]


def pill(verdict: Verdict) -> str:
    """A verdict as text, symbol and colour."""
    return f'<span class="pill {KINDS[verdict]}"><span aria-hidden="true">{MARKS[verdict]}</span> {verdict}</span>'


def _ledger_alert(study: Study) -> str:
    """What the ledger names against these runs, in front of every verdict on them."""
    named = alarms(study)
    if not named:
        return ""
    lines = "".join(f"<li>{text(line, 2000)}</li>" for line in named[:MOST_EXPLAINED])
    more = note(f"and {len(named) - MOST_EXPLAINED:,} more") if len(named) > MOST_EXPLAINED else ""
    head = "The ledger does not agree with these records"
    told = note("Read the verdicts below as exploratory; `retrain compare --ledger` says what can be done.")
    return f'<div class="alert"><h3>{head}</h3><ul class="why">{lines}</ul>{more}{told}</div>'


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


def _forest_plot(study: Study, number: int) -> str:
    caption = (
        f"dots: single seeds; large dot: their mean; line: its {level_words(study)} interval, and where it ends in an "
        "arrow, these seeds set no limit"
    )
    return plot(number, "Difference to the baseline", caption, "", kind="forest")


def _pairs_part(pairs_html: str) -> str:
    if not pairs_html:
        return ""
    told = "Each line is a seed: on the left the baseline, on the right the condition, both trained from the same seed."
    return f"<h3>Seed by seed</h3>{note(told)}{pairs_html}"


def _sets(study: Study, number: int) -> tuple[str, list[dict[str, Any]]]:
    """Every condition over all evaluation sets, with its performance profile; empty unless there are several."""
    if study.sets is None:
        return "", []
    tables = [
        table(found.title, found.heads, [tuple(map(text, row)) for row in found.rows], num_names=found.num_names)
        for found in sets_tables(study)
    ]
    caption = "how often a result is above a value: a curve further to the right is that of better results"
    drawn = plot(number, "Performance profile", caption, "")
    notes = "".join(note(line.removeprefix("--sets: ")) for line in sets_notes(study))
    return f"<h3>All evaluation sets together</h3>{notes}{''.join(tables)}{drawn}", [profile(study.sets)]


def _estimated_for(title: str) -> str:
    """What the intervals of a condition's table are for (`evidence.stats.binomial`)."""
    metric = Metric(title)
    is_held_out_rate = (metric.is_eval and metric.is_rate) or title.startswith("held-out pass")
    return ", for other seeds and other examples like these" if is_held_out_rate else " over seeds"


def _estimates(study: Study) -> list[str]:
    tables = [
        table(
            f"{found.title}: mean and 95 % interval{_estimated_for(found.title)}",
            found.heads,
            [tuple(map(text, row)) for row in found.rows],
        )
        for found in condition_tables(study)
    ]
    return tables[:1] + ([details("More metrics", "\n".join(tables[1:]))] if tables[1:] else [])
