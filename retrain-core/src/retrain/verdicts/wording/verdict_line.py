"""The line of a verdict: its size, its scope, how sure it is, and whether anybody had planned it."""

from __future__ import annotations

from retrain.records.runs.metric import shown_difference
from retrain.records.runs.registered import NO_PLAN
from retrain.verdicts.study.comparison import Comparison, VerdictReason
from retrain.verdicts.study.controls import controls_sentence
from retrain.verdicts.study.deciding_test import looks_sentence
from retrain.verdicts.study.looked import UNKNOWN
from retrain.verdicts.study.shopping import shopping_sentence
from retrain.verdicts.study.study import Study
from retrain.verdicts.wording.example_sentences import example_lines, scope_sentence
from retrain.verdicts.wording.sentences import UNVERIFIED, explanation
from retrain.verdicts.wording.typical_seed import lost_sentence, seeds_sentence
from retrain.verdicts.wording.words import over_seeds, scope, sized, too_few_seeds, verdict_words, worst_seeds

SUMMARY_CHARS = 240
NO_PLAN_BRIEF = "no plan was registered"


def verdict_line(comparison: Comparison, study: Study) -> str:
    """`better: +11.7 pp (95 % interval 6.1 to 17.2), over 8 seeds, on these 64 examples. Worst seed of each: ...`"""
    sentences = [
        f"{verdict_words(comparison)}: {_found(comparison, study)}",
        worst_seeds(comparison, study),
        short_standing(study),
        _on_record(study),
    ]
    return " ".join(f"{each}." for each in sentences if each)


def short_standing(study: Study) -> str:
    """`Planned`, or `Exploratory:` and the first reason, and the looks on record: `no plan was registered; 3 looks`."""
    looks = shopping_sentence(study.shopping)
    counted = f"; {looks}" if looks else ""
    if not study.exploratory:
        return f"Planned{f', unverified: {UNVERIFIED}' if study.is_unverified else ''}{counted}"
    first, *others = (NO_PLAN_BRIEF if each == NO_PLAN else each for each in study.exploratory)
    more = f", and {len(others)} more reason{'' if len(others) == 1 else 's'}" if others else ""
    return f"Exploratory: {first[:SUMMARY_CHARS]}{more}{counted}"


def _on_record(study: Study) -> str:
    """What the ledger names: the first of it on the line of each verdict. What it cannot know is told once."""
    certain = alarms(study)
    if not certain:
        return ""
    first, *others = certain
    shown = first if len(first) <= SUMMARY_CHARS else f"{first[:SUMMARY_CHARS].rstrip()} …"
    return f"The ledger names: {shown}" + (f"; and {len(others)} more" if others else "")


def alarms(study: Study) -> list[str]:
    """What the ledger names against these runs, without what it cannot know."""
    return [each for each in study.notices if not each.startswith(UNKNOWN)]


def further_lines(comparison: Comparison, study: Study) -> list[str]:
    """What else is to be said about this verdict, a sentence each: the reason first."""
    told = [
        explanation(comparison, study),
        looks_sentence(comparison.looks) if comparison.looks else "",
        seeds_sentence(comparison),
        lost_sentence(comparison, study),
        *example_lines(comparison.examples, study.metric),
    ]
    return [_sentence(each) for each in told if each]


def _sentence(text: str) -> str:
    """With a capital and a full stop, unless it begins with a symbol (`p = 0.03`)."""
    begun = text if text[1:2] == " " else text[0].upper() + text[1:]
    return begun if begun.endswith((".", "?", "!")) else f"{begun}."


def _found(comparison: Comparison, study: Study) -> str:
    if comparison.difference is None:
        return "no seed has a number on both sides"
    if comparison.cause is VerdictReason.TOO_FEW:
        return too_few_seeds(comparison, study)
    size = sized(comparison.difference, comparison.interval, comparison.level, study.metric)
    here = f"{size}, {over_seeds(len(comparison.seeds))}, on {scope(study)}"
    view = comparison.examples
    there = f"; {scope_sentence(view, study.metric)}" if view and view.interval else ""
    return f"{here}{there}{_despite(comparison, study)}"


def _despite(comparison: Comparison, study: Study) -> str:
    """Why a difference that leaves out zero is neither better nor worse; empty for all others."""
    match comparison.cause:
        case VerdictReason.NOT_BEYOND_CONTROL:
            return f", but {controls_sentence(comparison, study.metric)}"
        case VerdictReason.WITHIN | VerdictReason.FOUND_WITHIN:
            margin = shown_difference(comparison.margin, study.metric, signed=False)
            return f", inside the planned margin of ±{margin}"
    return ""
