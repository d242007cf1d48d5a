"""The line of a verdict: its size, its scope, how sure it is, and whether anybody had planned it."""

from __future__ import annotations

from retrain.rooms.evidence.study.deciding import looks_sentence
from retrain.rooms.evidence.study.family import Comparison
from retrain.rooms.evidence.study.registered import NO_PLAN
from retrain.rooms.evidence.study.study import Study
from retrain.rooms.insight.compare.example_sentences import example_lines, scope_sentence
from retrain.rooms.insight.compare.sentences import explanation
from retrain.rooms.insight.compare.typical_seed import lost_sentence, seeds_sentence
from retrain.rooms.insight.compare.words import over_seeds, scope, sized, worst_seeds

SUMMARY_CHARS = 160
NO_PLAN_BRIEF = "no plan was registered"


def verdict_line(comparison: Comparison, study: Study) -> str:
    """`better: +11.7 pp (95 % interval 6.1 to 17.2), over 8 seeds, on these 64 examples. Worst seed of each: ...`"""
    sentences = [
        f"{comparison.verdict}: {_found(comparison, study)}",
        worst_seeds(comparison, study),
        short_standing(study),
    ]
    return " ".join(f"{each}." for each in sentences if each)


def short_standing(study: Study) -> str:
    """`Planned`, or `Exploratory:` and the first reason; the others are listed once for the whole comparison."""
    if not study.exploratory:
        return "Planned"
    first, *others = (NO_PLAN_BRIEF if each == NO_PLAN else each for each in study.exploratory)
    more = f", and {len(others)} more reason{'' if len(others) == 1 else 's'}" if others else ""
    return f"Exploratory: {first[:SUMMARY_CHARS]}{more}"


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
    size = sized(comparison.difference, comparison.interval, comparison.level, study.metric)
    here = f"{size}, {over_seeds(len(comparison.seeds))}, on {scope(study)}"
    view = comparison.examples
    return f"{here}; {scope_sentence(view, study.metric)}" if view and view.interval else here
