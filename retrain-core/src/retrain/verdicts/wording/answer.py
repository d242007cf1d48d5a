"""The answer of a comparison in one sentence, before any table."""

from __future__ import annotations

from collections.abc import Sequence

from retrain.records.runs.metric import shown_difference
from retrain.verdicts.study.comparison import Comparison, Verdict, VerdictReason
from retrain.verdicts.study.controls import controls_sentence
from retrain.verdicts.study.study import Study
from retrain.verdicts.wording.words import (
    over_seeds,
    policies_sentence,
    scope,
    sized,
    too_few_seeds,
    verdict_words,
)

MOST_NAMED = 6
NOTHING = "Only one condition: there is nothing to compare it with."


def answer(study: Study) -> str:
    """Verdict, size, scope and standing of a single comparison; of several, the conditions by verdict."""
    if study.two_runs:
        return f"{policies_sentence(study.two_runs)}."
    if not study.comparisons:
        return NOTHING
    if len(study.comparisons) == 1:
        return f"{_single(study.comparisons[0], study)}{_standing(study, study.comparisons)}."
    against = {each.baseline for each in study.comparisons}
    head = f"Against {study.baseline}" if len(against) == 1 else "In pairs"
    head = f"{head}, {over_seeds(min(len(each.seeds) for each in study.comparisons))}"
    groups: dict[str, list[Comparison]] = {}
    for verdict in Verdict:
        for each in study.comparisons:
            if each.verdict is verdict:
                groups.setdefault(verdict_words(each), []).append(each)
    parts = [f"{words}: {_named(found, study, in_pairs=len(against) > 1)}" for words, found in groups.items()]
    return f"{head}, on {scope(study)}: {'; '.join(parts)}{_standing(study, study.comparisons)}."


def _single(comparison: Comparison, study: Study) -> str:
    condition, baseline = comparison.condition, comparison.baseline
    if comparison.difference is None:
        return f"Nothing can be told about {condition} against {baseline}: no seed has a number on both sides"
    if comparison.cause is VerdictReason.TOO_FEW:
        return f"{condition} against {baseline}: {too_few_seeds(comparison, study)}"
    size = sized(comparison.difference, comparison.interval, comparison.level, study.metric)
    found = f"{size}, {over_seeds(len(comparison.seeds))}, on {scope(study)}"
    match comparison.verdict:
        case Verdict.CANNOT_TELL if comparison.cause is VerdictReason.NOT_BEYOND_CONTROL:
            but = controls_sentence(comparison, study.metric)
            return f"{condition} is not shown to be better than {baseline}: {found}, but {but}"
        case Verdict.CANNOT_TELL:
            return f"These runs cannot tell if {condition} is better than {baseline}: {found}"
        case Verdict.PRACTICALLY_SAME:
            margin = shown_difference(comparison.margin, study.metric, signed=False)
            return f"{condition} is practically the same as {baseline}: {found}, inside the planned margin of ±{margin}"
    verdict, _, unless = verdict_words(comparison).partition(",")
    return f"{condition} is {verdict} than {baseline}{f',{unless}' if unless else ''}: {found}"


def _named(found: Sequence[Comparison], study: Study, *, in_pairs: bool) -> str:
    named = [
        f"{each.condition}{f' against {each.baseline}' if in_pairs else ''}{_size(each, study)}"
        for each in found[:MOST_NAMED]
    ]
    return ", ".join([*named, *([f"{len(found) - MOST_NAMED} more"] if len(found) > MOST_NAMED else [])])


def _size(comparison: Comparison, study: Study) -> str:
    if comparison.difference is None:
        return ""
    few = (
        f", too few seeds: {comparison.least_seeds} are the fewest" if comparison.cause is VerdictReason.TOO_FEW else ""
    )
    return f" ({shown_difference(comparison.difference, study.metric)}{few})"


def _standing(study: Study, comparisons: Sequence[Comparison]) -> str:
    """Exploratory verdicts are marked where they are stated; without a verdict there is nothing to mark."""
    decided = any(each.verdict is not Verdict.CANNOT_TELL for each in comparisons)
    return f" ({study.standing})" if decided else ""
