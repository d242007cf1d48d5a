"""Verdicts in words: the answer of a comparison, the line of each verdict, and the sentences below it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from retrain.records.runs.curves import Metric, shown, shown_difference
from retrain.text.amounts import counted, duration, first_few
from retrain.verdicts.stats.components import MOST, Advice, Foreseen, Needed, Way
from retrain.verdicts.study.comparison import Comparison, ExamplesView, Verdict, VerdictReason
from retrain.verdicts.study.comparison_with_ledger import UNKNOWN
from retrain.verdicts.study.looks import looks_sentence
from retrain.verdicts.study.safeguards import controls_sentence
from retrain.verdicts.study.study import NO_PLAN, Study
from retrain.verdicts.wording import sentences
from retrain.verdicts.wording.sentences import scope, sized, too_few_seeds, verdict_words

MOST_NAMED, MOST_SEEDS = 6, 5
ONE_CHOICE = "About the chosen values: one choice for all seeds repeats its luck in each of them"
SUMMARY_CHARS = 240


def verdict_line(comparison: Comparison, study: Study) -> str:
    """`better: +11.7 pp (95 % interval 6.1 to 17.2), over 8 seeds, on these 64 examples. Worst seed of each: ...`"""
    told = [f"{verdict_words(comparison)}: {_found(comparison, study)}"]
    if study.tuning:
        # Before the verdict: a baseline that was not tuned as well explains most gains.
        told = [*filter(None, [study.tuning.unequal(comparison.baseline, comparison.condition)]), *told]
        told += [] if study.tuning.is_per_seed else [ONE_CHOICE]
    if by_task := sentences.tasks_sentence(comparison, study):
        told.append(by_task)
    if seeds := comparison.per_seed:
        left, right = (shown(value, study.metric) for value in (seeds.worst_baseline, seeds.worst_condition))
        told.append(f"Worst seed of each: {comparison.baseline} {left}, {comparison.condition} {right}")
    if not study.exploratory:
        standing = f"Planned{f', unverified: {sentences.UNVERIFIED}' if study.is_unverified else ''}"
    else:
        first, *others = ("no plan was registered" if each == NO_PLAN else each for each in study.exploratory)
        more = f", and {counted(len(others), 'more reason')}" if others else ""
        standing = f"Exploratory: {first[:SUMMARY_CHARS]}{more}"
    told.append(standing + sentences.looks_note(study))
    if certain := alarms(study):
        # Its doubts are listed once, below all verdicts.
        first, *others = certain
        cut = first if len(first) <= SUMMARY_CHARS else f"{first[:SUMMARY_CHARS].rstrip()} …"
        told.append(f"The ledger names: {cut}" + (f"; and {len(others)} more" if others else ""))
    return " ".join(f"{each}." for each in told)


def alarms(study: Study) -> list[str]:
    """Return the ledger's contradictions about these runs, without the unknowns."""
    return [each for each in study.notices if not each.startswith(UNKNOWN)]


def further_lines(comparison: Comparison, study: Study) -> list[str]:
    view = comparison.examples
    told = [
        effect_sentence(comparison, study),
        sentences.explanation(comparison, study),
        looks_sentence(comparison.looks) if comparison.looks else "",
        seeds_sentence(comparison),
        lost_sentence(comparison, study),
        *equal_budget_sentences(comparison, study),
        scope_sentence(view, study.metric) if view and view.interval is None else "",
        advice_sentence(view, study.metric) if view else "",
    ]
    # With a capital and a full stop, unless the sentence begins with a symbol (`p = 0.03`).
    begun = (each if each[1:2] == " " else each[0].upper() + each[1:] for each in told if each)
    return [each if each.endswith((".", "?", "!")) else f"{each}." for each in begun]


def _found(comparison: Comparison, study: Study) -> str:
    if comparison.difference is None:
        return "no seed has a number on both sides"
    if comparison.cause is VerdictReason.TOO_FEW:
        return too_few_seeds(comparison, study)
    view = comparison.examples
    there = f"; {scope_sentence(view, study.metric)}" if view and view.interval else ""
    return f"{_here(comparison, study)}{there}{_despite(comparison, study)}"


def _here(comparison: Comparison, study: Study) -> str:
    size = sized(comparison.difference, comparison.interval, comparison.level, study.metric)
    return f"{size}, over {counted(len(comparison.seeds), 'seed')}, on {scope(study)}"


def _despite(comparison: Comparison, study: Study) -> str:
    """Return why a difference that leaves out zero is neither better nor worse; empty for all others."""
    match comparison.cause:
        case VerdictReason.NOT_BEYOND_CONTROL:
            return f", but {controls_sentence(comparison, study.metric)}"
        case VerdictReason.WITHIN | VerdictReason.FOUND_WITHIN:
            margin = shown_difference(comparison.margin, study.metric, signed=False)
            return f", inside the planned margin of ±{margin}"
    return ""


def effect_sentence(comparison: Comparison, study: Study) -> str:
    """Return a factorial's effect in a sentence; empty for other comparisons."""
    effect = comparison.effect
    if effect is None:
        return ""
    is_open = comparison.verdict is Verdict.CANNOT_TELL
    if len(effect.levels) == 1:
        [(name, level)] = effect.levels.items()
        over = f", averaged over {' and '.join(effect.over)}" if effect.over else ""
        verb = "may be better or worse" if is_open else f"is {verdict_words(comparison)}"
        line = f"Main effect of {name}: {level} {verb} than {effect.reference[name]}{over}"
        line = line.replace("practically the same than", "practically the same as")
    else:
        both = " and ".join(f"{name}={level}" for name, level in effect.levels.items())
        words = {
            Verdict.BETTER: "do better together than the sum of their single effects",
            Verdict.WORSE: "do worse together than the sum of their single effects",
            Verdict.PRACTICALLY_SAME: "add up",
            Verdict.CANNOT_TELL: "may help or hinder each other",
        }
        line = f"Interaction: {both} {words[comparison.verdict]}"
    size = sized(comparison.difference, comparison.interval, comparison.level, study.metric)
    found = (each.effect for each in study.comparisons if each.verdict in (Verdict.BETTER, Verdict.WORSE))
    pairs = (each.levels for each in found if each and len(effect.levels) == 1 and len(each.levels) == 2)
    on = [name for levels in pairs if effect.levels.items() <= levels.items() for name in levels.keys() - effect.levels]
    depends = f"; an average of unlike effects, since it depends on {' and '.join(on)}" if on else ""
    return f"{line}: {size}{_despite(comparison, study)}{depends}"


NOTHING = "Only one condition: there is nothing to compare it with."


def equal_budget_sentences(comparison: Comparison, study: Study) -> list[str]:
    """Return the comparison at the same number of configurations, by the tuning runs."""
    found, metric = (study.tuning.at_equal_budget, study.tuning.metric) if study.tuning else ((), study.metric)
    return [
        f"at equal budget, the best of {each.size} configurations each on the tuning runs: {each.verdict}, "
        f"{shown_difference(each.difference, metric)}, p = {sentences.probability(each.p)}"
        for each in found
        if (each.baseline, each.condition) == (comparison.baseline, comparison.condition)
    ]


def answer(study: Study) -> str:
    """Return verdict, size, scope and standing of a single comparison; of several, the conditions by verdict.

    Conditions that were not tuned alike are named first.
    """
    unequal = study.tuning.unequal() if study.tuning and study.comparisons else ""
    return f"{unequal}. {_answer(study)}" if unequal else _answer(study)


def _answer(study: Study) -> str:
    if study.two_runs:
        return f"{sentences.policies_sentence(study.two_runs)}."
    if not study.comparisons:
        return NOTHING
    decided = any(each.verdict is not Verdict.CANNOT_TELL for each in study.comparisons)
    standing = f" ({study.standing})" if decided else ""  # without a verdict there is nothing to mark
    if len(study.comparisons) == 1:
        return f"{_single(study.comparisons[0], study)}{standing}."
    against = {each.baseline for each in study.comparisons}
    head = f"Against {study.baseline}" if len(against) == 1 else "In pairs"
    head = "Effects of the factors" if study.comparisons[0].effect else head
    fewest = min(len(each.seeds) for each in study.comparisons)
    groups: dict[str, list[Comparison]] = {}
    for verdict in Verdict:
        for each in study.comparisons:
            if each.verdict is verdict:
                groups.setdefault(verdict_words(each), []).append(each)
    parts = [f"{words}: {_named(found, study, in_pairs=len(against) > 1)}" for words, found in groups.items()]
    return f"{head}, over {counted(fewest, 'seed')}, on {scope(study)}: {'; '.join(parts)}{standing}."


def _single(comparison: Comparison, study: Study) -> str:
    condition, baseline = comparison.condition, comparison.baseline
    if comparison.difference is None:
        return f"Nothing is known about {condition} against {baseline}: no seed has a number on both sides"
    if comparison.cause is VerdictReason.TOO_FEW:
        return f"{condition} against {baseline}: {too_few_seeds(comparison, study)}"
    found = f"{_here(comparison, study)}{_despite(comparison, study)}"
    match comparison.verdict:
        case Verdict.CANNOT_TELL if comparison.cause is VerdictReason.NOT_BEYOND_CONTROL:
            return f"{condition} is not shown to be better than {baseline}: {found}"
        case Verdict.CANNOT_TELL:
            return f"These runs cannot tell if {condition} is better than {baseline}: {found}"
        case Verdict.PRACTICALLY_SAME:
            return f"{condition} is practically the same as {baseline}: {found}"
    verdict, _, unless = verdict_words(comparison).partition(",")
    return f"{condition} is {verdict} than {baseline}{f',{unless}' if unless else ''}: {found}"


def _named(found: Sequence[Comparison], study: Study, *, in_pairs: bool) -> str:
    named = []
    for each in found[:MOST_NAMED]:
        against = f" against {each.baseline}" if in_pairs else ""
        few = f", too few seeds: {each.least_seeds} are the fewest" if each.cause is VerdictReason.TOO_FEW else ""
        size = "" if each.difference is None else f" ({shown_difference(each.difference, study.metric)}{few})"
        named.append(f"{each.condition}{against}{size}")
    return ", ".join(named + [f"{len(found) - MOST_NAMED} more"] * (len(found) > MOST_NAMED))


def seeds_sentence(comparison: Comparison) -> str:
    """Return how many seeds agree, with exact limits for the chance of another seed."""
    seeds = comparison.per_seed
    if seeds is None:
        return ""
    low, high = (f"{100 * limit:.0f}" for limit in seeds.in_pairs.interval)
    tied = f", {seeds.ties} tied" if seeds.ties else ""
    chance = f"the chance that another seed is better is {low} to {high} %"
    return f"better in {seeds.wins} of {len(seeds.baseline)} seeds{tied}: {chance}"


def lost_sentence(comparison: Comparison, study: Study) -> str:
    lost = comparison.lost
    if lost is None or lost.difference is None:
        return ""
    sides = ((comparison.baseline, lost.baseline_seeds), (comparison.condition, lost.condition_seeds))
    runs = " and ".join(f"{counted(len(seeds), 'lost run')} of {label}" for label, seeds in sides if seeds)
    size = sized(lost.difference, lost.interval, lost.level, study.metric)
    line = f"with {runs} at the worst value seen ({shown(lost.worst, study.metric)}): {lost.verdict}, {size}"
    if lost.survives or comparison.verdict is Verdict.CANNOT_TELL:
        return line
    return f"{line}; '{comparison.verdict}' does not survive the lost runs"


def collapse_sentences(study: Study) -> list[str]:
    told = []
    for each in study.collapses:
        named = first_few([*map(str, each.seeds)], MOST_SEEDS)
        seeds = f"seed {named} lies" if len(each.seeds) == 1 else f"seeds {named} lie"
        worst, median = shown(each.worst, study.metric), shown(each.median, study.metric)
        far = f"{each.condition}: {seeds} far from the others (worst {worst}, median {median})"
        told.append(f"{far}; a verdict is about the typical seed and does not rule out such a one")
    return told


def scope_sentence(view: ExamplesView, metric: Metric) -> str:
    """Return `on examples like these: +11.7 pp (95 % interval 1.9 to 21.5)`, or why that is unknown."""
    head = "on examples like these"
    if view.interval is None or view.estimate is None or view.level is None:
        return f"{head}: unknown, since {view.reason}"
    if view.num_clusters < view.num_examples:
        head += f" from other sources (these are of {view.num_clusters})"
    return f"{head}: {sized(view.estimate, view.interval, view.level, metric)}"


def advice_sentence(view: ExamplesView, metric: Metric) -> str:
    advice = view.advice
    if advice is None:
        return ""
    if math.isinf(advice.half_width):
        doubled = f"{view.num_seeds} seeds are too few to bound it on examples like these, whatever the examples"
    else:
        doubled = (
            f"± {shown_difference(advice.half_width, metric, signed=False)} on examples like these would narrow with "
            f"{2 * view.num_seeds} seeds, to about {_half(advice.twice_seeds, metric)}, or with "
            f"{2 * view.num_examples} examples, to {_half(advice.twice_examples, metric)}"
        )
    told = [doubled, _needed(view, advice, metric)]
    if advice.cheaper is not None and advice.cost is not None:
        cost = f"measured: {duration(advice.cost.seed_s)} for a seed, {duration(advice.cost.example_s)} for an example"
        told.append(f"more {advice.cheaper} are the cheaper way ({cost})")
    return "; ".join([*told, "seeds that no plan foresaw are judged by a stricter test"])


def _needed(view: ExamplesView, advice: Advice, metric: Metric) -> str:
    ways = ((Way.SEEDS, advice.seeds), (Way.EXAMPLES, advice.examples))
    told = []
    for way, needed in ways:
        number = f"more than {MOST:,}" if needed.number is None else f"{needed.number:,}"
        told += [f"{number} (80 %: {_range(needed)}) {way}"] if advice.is_clear(way) else []
    if told:
        difference = shown_difference(view.estimate, metric)
        return f"if the true difference is {difference}, it would be found 4 times in 5 with {' or '.join(told)}"
    ranges = ", ".join(f"{_range(needed)} {way}" for way, needed in ways)
    return f"{view.num_seeds} seeds are too few to say how many would decide (80 %: {ranges})"


def _half(foreseen: Foreseen, metric: Metric) -> str:
    low, high = (shown_difference(end, metric, signed=False).removesuffix(" pp") for end in foreseen.interval)
    return f"± {shown_difference(foreseen.half_width, metric, signed=False)} (80 %: {low} to {high})"


def _range(needed: Needed) -> str:
    low, high = (f"more than {MOST:,}" if end is None else f"{end:,}" for end in needed.interval)
    return low if low == high else f"{low} to {high}"
