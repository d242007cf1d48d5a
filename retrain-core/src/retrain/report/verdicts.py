"""The comparison of `retrain compare`, with the same sentences, in plain language at the top of the page, and drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrain.kernel.contracts.report import ReportPlot
from retrain.records.reading import number
from retrain.records.runs.curves import Metric, shown
from retrain.report import parts as html
from retrain.report.designs import by_factor, by_rate
from retrain.report.gather import Material
from retrain.verdicts.study.comparison import Comparison, Verdict
from retrain.verdicts.study.study import Study
from retrain.verdicts.wording import plain_words, sentences, show, verdict_line

MARKS = {Verdict.BETTER: "▲", Verdict.WORSE: "▼", Verdict.PRACTICALLY_SAME: "≈", Verdict.CANNOT_TELL: "●"}
KINDS: Mapping[Verdict, str] = {
    Verdict.BETTER: "better",
    Verdict.WORSE: "worse",
    Verdict.PRACTICALLY_SAME: "same",
    Verdict.CANNOT_TELL: "open",
}
MOST_EXPLAINED = 12
MOST_PAIRS = 12  # comparisons whose seeds are drawn
NAME_CHARS = 80


def findings(material: Material) -> html.Box | None:
    """Return the findings, their scope and certainty in words without statistics; None if nothing is compared."""
    study = material.study
    if study is None or not study.comparisons:
        return None
    return html.Box("findings", "In plain words", [html.Paragraph([line]) for line in plain_words.summary(study)])


def verdict_section(material: Material) -> html.Section:
    study = material.study
    if study is None:
        return html.Section("verdict", "Verdict", [html.note(f"Nothing can be compared: {material.no_study}.")])
    if not study.comparisons:
        nothing = html.note(verdict_line.NOTHING) if len(material.runs) > 1 else None
        return html.Section("verdict", "Results", [nothing, *_estimates(study)])
    lines = [*sentences.differing(study), *sentences.on_record(study), *sentences.survivors(study)[:MOST_EXPLAINED]]
    lines += [sentences.metric_sentence(study), sentences.runs_sentence(study), sentences.budget_sentence(study)]
    parts: list[html.Part | None] = [
        _ledger_alert(study),
        html.lede(verdict_line.answer(study)),
        html.Paragraph([sentences.standing(study)], "note strong"),
        *map(html.note, lines),
        _comparisons(study),
        _explanations(study),
        *(html.note(line) for line in [*verdict_line.collapse_sentences(study), sentences.next_step(study)] if line),
        _forest_plot(study),
        *by_factor(study, material.source.factors),
        *by_rate(study),
        *_seed_by_seed(study),
        *_sets(study),
        *_tuning(study),
        *_estimates(study),
    ]
    return html.Section("verdict", "Verdict", parts)


def _ledger_alert(study: Study) -> html.Box | None:
    """Return the objections of the ledger to these runs, for a place in front of every verdict on them."""
    named = verdict_line.alarms(study)
    if not named:
        return None
    parts = (
        html.Items([("", [line]) for line in named[:MOST_EXPLAINED]]),
        html.and_more(len(named), MOST_EXPLAINED),
        html.note("Read the verdicts below as exploratory; `retrain compare --ledger` lists the remedies."),
    )
    return html.Box("alert", "The ledger does not agree with these records", parts)


def _comparisons(study: Study) -> html.Table:
    found = show.comparison_table(study)
    rows: list[tuple[html.Piece, ...]] = [
        (*row[:-1], html.Pill(each.verdict, KINDS[each.verdict], MARKS[each.verdict]))
        for row, each in zip(found.rows, study.comparisons, strict=True)
    ]
    return html.Table(f"Comparisons on {found.title}", found.heads, rows, num_names=found.num_names)


def _explanations(study: Study) -> html.Items | html.Fold:
    items = [
        (each.condition, (verdict_line.verdict_line(each, study), *verdict_line.further_lines(each, study)))
        for each in study.comparisons
    ]
    if len(items) <= MOST_EXPLAINED:
        return html.Items(items)
    return html.Fold("Why, comparison by comparison", [html.Items(items)])


def _forest_plot(study: Study) -> html.Plot | None:
    caption = (
        f"dots: single seeds; large dot: their mean; line: its {sentences.level_words(study.comparisons)} interval; "
        "where it ends in an arrow, these seeds set no limit"
    )
    figure = forest(study)
    return html.Plot("Difference to the baseline", caption, figure, kind="forest") if figure else None


def forest(study: Study) -> dict[str, Any] | None:
    """Return differences with their intervals and single seeds, the largest at the top; an open end is null."""
    known = [each for each in study.comparisons if each.difference is not None and each.interval is not None]
    if not known:
        return None
    known.sort(key=lambda each: each.difference or 0.0)
    scale = 100.0 if study.metric.is_rate else 1.0
    several = len({each.baseline for each in known}) > 1
    names = [f"{each.condition} − {each.baseline}" if several and not each.effect else each.condition for each in known]
    return {
        "kind": "forest",
        "unit": f"difference in {'percentage points' if study.metric.is_rate else html.plain(study.metric, 40)}",
        "labels": [html.plain(name, NAME_CHARS) for name in names],
        "values": [scale * (each.difference or 0.0) for each in known],
        "low": [number(scale * each.interval[0]) for each in known if each.interval],
        "high": [number(scale * each.interval[1]) for each in known if each.interval],
        "seeds": [[scale * (right - left) for _, left, right in _sides(each)] for each in known],
        "verdicts": [KINDS[each.verdict] for each in known],
    }


def _seed_by_seed(study: Study) -> list[html.Part]:
    plots = seed_plots(study)
    legend = "Each line is a seed: on the left the baseline, on the right the condition, trained from the same seed."
    return [html.Heading("Seed by seed"), html.note(legend), html.Tiles("pairs", plots)] if plots else []


def seed_plots(study: Study) -> list[html.Plot]:
    """Return a small figure per comparison: each seed as a line from the baseline to the condition."""
    order = {verdict: place for place, verdict in enumerate(KINDS)}
    chosen = sorted((each for each in study.comparisons if each.per_seed), key=lambda each: order[each.verdict])
    chosen = chosen[:MOST_PAIRS]
    scale = 100.0 if study.metric.is_rate else 1.0
    ends = [scale * value for each in chosen for _, *values in _sides(each) for value in values]
    plots = []
    for each in chosen:
        # The markers at both ends would otherwise be cut by the frame.
        room = 0.06 * ((max(ends) - min(ends)) or 1.0)
        figure = {
            "kind": "pair",
            "share": study.metric.is_rate,
            "lines": [{"seed": seed, "y": [scale * left, scale * right]} for seed, left, right in _sides(each)],
            "verdict": KINDS[each.verdict],
            "range": [min(ends) - room, max(ends) + room],
        }
        rising = sum(right > left for _, left, right in _sides(each))
        title = f"{each.condition} against {each.baseline}"
        rows = [(str(seed), shown(x, study.metric), shown(y, study.metric)) for seed, x, y in _sides(each)]
        numbers = html.Table(title, ("seed", each.baseline, each.condition), rows, is_caption_shown=False)
        remark = f"higher in {rising} of {len(each.seeds)} seeds"
        plots.append(html.Plot(title, remark, figure, numbers, kind="pair", level=4))
    return plots


def _sets(study: Study) -> list[html.Part]:
    """Return every condition over all evaluation sets, with the share of seeds and sets above each threshold."""
    view = study.sets
    if view is None:
        return []
    profile = ReportPlot(
        title="Performance profile",
        note="how often a result is above a value: of two curves, the one further to the right is better",
        x=view.thresholds,
        lines={each.condition: each.profile for each in view.conditions},
        x_title="rate" if all(metric.is_rate for metric in view.metrics) else str(view.metrics[0]),
        y_title="share of seeds and sets above it",
        y_mark=0.5,
        is_share=True,
    )
    return [
        html.Heading("All tasks together" if view.tasks == view.names else "All evaluation sets together"),
        *(html.note(line.removeprefix("--sets: ").removeprefix("tasks: ")) for line in show.sets_notes(study)),
        *(html.Table(each.title, each.heads, each.rows, num_names=each.num_names) for each in show.sets_tables(study)),
        html.drawn(profile),
    ]


def _tuning(study: Study) -> list[html.Part]:
    """Return performance against tuning budget."""
    view = study.tuning
    if view is None:
        return []
    tuned = {each.condition: each.curve for each in view.conditions if each.curve}
    sizes = sorted({size for curve in tuned.values() for size in curve})
    ends = [{size: pair[end] for size, (_, pair) in curve.items()} for curve in tuned.values() for end in (0, 1)]
    plot = ReportPlot(
        title="Performance against tuning budget",
        note="expected best of so many configurations; thin lines: its 95 % interval",
        x=sizes,
        lines={label: [curve[size][0] if size in curve else None for size in sizes] for label, curve in tuned.items()},
        thin_lines=[[found.get(size) for size in sizes] for found in ends],
        x_title="configurations",
        y_title=str(view.metric),
        is_log_x=True,
        is_share=view.metric.is_rate,
    )
    tables = (
        html.Table(each.title, each.heads, each.rows, num_names=each.num_names) for each in show.tuning_tables(study)
    )
    return [html.Heading("Tuning"), *(html.note(line) for line in show.tuning_notes(study)), *tables, html.drawn(plot)]


def _estimated_for(title: str) -> str:
    metric = Metric(title)
    is_held_out_rate = (metric.is_eval and metric.is_rate) or title.startswith("held-out pass")
    return ", for other seeds and other examples like these" if is_held_out_rate else " over seeds"


def _estimates(study: Study) -> list[html.Part]:
    found = [
        html.Table(f"{each.title}: mean and 95 % interval{_estimated_for(each.title)}", each.heads, each.rows)
        for each in show.condition_tables(study)
    ]
    return [*found[:1], *([html.Fold("More metrics", found[1:])] if found[1:] else [])]


def _sides(comparison: Comparison) -> list[tuple[int, float, float]]:
    found = comparison.per_seed
    return list(zip(comparison.seeds, found.baseline, found.condition, strict=True)) if found else []
