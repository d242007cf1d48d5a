"""Renders a comparison for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from retrain.text.tables import escaped, markdown_table, rich_table
from retrain.text.terminal_text import printable
from retrain.verdicts.study.comparison import Verdict
from retrain.verdicts.study.study import Study
from retrain.verdicts.wording import sentences
from retrain.verdicts.wording.tables import TextTable, comparison_table, condition_tables, sets_notes, sets_tables
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
        parts += [Text(), Text(printable(title), style="bold"), _rich(table)]
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
    yield from ((each.title, each) for each in sets_tables(study))


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
    yield from filter(None, (sentences.beforehand(study), sentences.next_step(study)))
    yield from sets_notes(study)
    for each in study.left_out[:MOST_LINES]:
        yield f"left out: {each.name}: {each.reason}"
    if len(study.left_out) > MOST_LINES:
        yield f"and {len(study.left_out) - MOST_LINES} more left out: --json has all of them"


def _rich(content: TextTable) -> Table:
    rows = ([Text(printable(cell), style=COLOURS.get(cell, "")) for cell in row] for row in content.rows)
    return rich_table(content.heads, rows, num_names=content.num_names)
