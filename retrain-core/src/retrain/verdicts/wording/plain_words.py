"""A study in plain language, for readers who know no statistics: the findings, their scope, and their certainty."""

from __future__ import annotations

import math
from collections.abc import Sequence

from retrain.records.runs.curves import CORRECT, HELD_OUT, Metric, Summary
from retrain.text.amounts import counted
from retrain.verdicts.study.comparison import Comparison, Verdict, VerdictReason
from retrain.verdicts.study.study import Study
from retrain.verdicts.wording.sentences import limits, percent, tasks_sentence, too_few_seeds
from retrain.verdicts.wording.verdict_line import effect_sentence

MOST_NAMED = 6
WHEN = {Summary.FINAL: "at the end of training", Summary.BEST: "at its best", Summary.AUC: "averaged over training"}


def summary(study: Study) -> list[str]:
    effects = [f"{line}." for each in study.comparisons if (line := effect_sentence(each, study))]
    found = effects or [*_found(study), *_open(study)]
    return [_compared(study), *found, _holds_for(study), _sure(study), _typical(study)]


def _compared(study: Study) -> str:
    seeds = [len(each.seeds) for each in study.conditions]
    times = counted(max(seeds), "time") if min(seeds) == max(seeds) else f"{min(seeds)} to {max(seeds)} times"
    where = f" on {study.num_examples:,} test questions" if study.num_examples else ""
    fields = {HELD_OUT.field: "the share of right answers", CORRECT.field: "the share of right answers in training"}
    measured = f"{fields.get(study.metric.field, study.metric.field)} {WHEN[study.metric.summary]}"
    ways = f"{counted(len(study.conditions), 'way')} to train were compared"
    unequal = f"{told}. " if study.tuning and (told := study.tuning.unequal()) else ""
    return f"{unequal}{ways}; each was trained {times} from different seeds. The measure is {measured}{where}."


def _found(study: Study) -> list[str]:
    told = []
    for verdict in (Verdict.BETTER, Verdict.WORSE):
        found = [each for each in study.comparisons if each.verdict is verdict]
        for baseline in dict.fromkeys(each.baseline for each in found):
            own = [each for each in found if each.baseline == baseline]
            told.append(f"{verdict.value.capitalize()} than {baseline}: {_named(own, study.metric)}.")
    if not told:
        told = ["No way is shown to be better or worse than another."]
    same = [each.condition for each in study.comparisons if each.verdict is Verdict.PRACTICALLY_SAME]
    if same:
        margin = next((each.margin for each in study.comparisons if each.margin is not None), None)
        beforehand = "" if margin is None else f" (no more than {_size(margin, study.metric)} apart, as was planned)"
        told.append(f"Practically the same{beforehand}: {_listed(same)}.")
    by_task = ((each, tasks_sentence(each, study)) for each in study.comparisons)
    return [*told, *(f"{each.condition} against {each.baseline}: {said}." for each, said in by_task if said)]


def _open(study: Study) -> list[str]:
    undecided = [each for each in study.comparisons if each.verdict is Verdict.CANNOT_TELL]
    withheld = [each.condition for each in undecided if each.cause is VerdictReason.NOT_BEYOND_CONTROL]
    why = "there is a difference, but training with useless rewards, or none, comes as far"
    told = [f"{_listed(withheld)}: {why}. So it is not shown that the rewards did it."] if withheld else []
    few = [each for each in undecided if each.cause is VerdictReason.TOO_FEW]
    told += [f"{each.condition} against {each.baseline}: {too_few_seeds(each, study)}." for each in few[:MOST_NAMED]]
    if len(few) > MOST_NAMED:
        told.append(f"For {len(few) - MOST_NAMED} more there are too few seeds, too.")
    settled = (VerdictReason.NOT_BEYOND_CONTROL, VerdictReason.TOO_FEW)
    found = [each for each in undecided if each.cause not in settled]
    if not found:
        return told
    if len(found) == len(study.comparisons):
        names = "any of them" if len(found) > 1 else f"{found[0].condition} and {found[0].baseline}"
    else:
        names = _listed([each.condition for each in found])
    sentence = f"For {names} these runs cannot tell. That does not mean that there is no difference"
    ends = [end for each in found for end in (each.interval or (-math.inf, math.inf))]
    if all(map(math.isfinite, ends)):
        low, high = min(ends), max(ends)
        sentence += f": the true one may lie anywhere from {_side(low, study.metric)} to {_side(high, study.metric)}"
    return [*told, f"{sentence}."]


def _named(found: Sequence[Comparison], metric: Metric) -> str:
    named = []
    for each in found[:MOST_NAMED]:
        named.append(each.condition)
        if each.difference is not None and each.interval is not None:
            low, high = sorted(map(abs, each.interval))
            named[-1] += f", by {_side(each.difference, metric)} (plausible: {limits((low, high), metric)})"
    return "; ".join(named + [f"and {len(found) - MOST_NAMED} more"] * (len(found) > MOST_NAMED))


def _side(value: float, metric: Metric) -> str:
    return f"{_size(abs(value), metric)} {'more' if value > 0 else 'less'}"


def _size(value: float, metric: Metric) -> str:
    return f"{100 * value:.1f} percentage points" if metric.is_rate else f"{value:.3g}"


def _holds_for(study: Study) -> str:
    if not study.metric.is_eval:
        return "This holds for the prompts of training, whose answers are rewarded; it says nothing about new ones."
    if study.other_examples:
        return "The ways were not tested on the same questions, so this need not hold for any questions."
    which = f"these {study.num_examples:,} questions" if study.num_examples else "these questions"
    told = f"This holds for {which} and for training with other seeds; for other questions it need not."
    found = [each for each in study.comparisons if each.verdict in (Verdict.BETTER, Verdict.WORSE)]
    known = [each for each in found if each.examples and each.examples.interval]
    if not known:
        return told
    wider = [each.condition for each in known if _is_clear(each)]
    open_ = [each.condition for each in known if not _is_clear(each)]
    also = f" For other questions like these it holds too: {_listed(wider)}." if wider else ""
    told = f"This holds for {which} and for training with other seeds.{also}"
    return f"{told} Whether it does for other questions like these is open: {_listed(open_)}." if open_ else told


def _is_clear(comparison: Comparison) -> bool:
    """True if the interval for other examples leaves out zero on the side of the difference."""
    interval = comparison.examples.interval if comparison.examples else None
    if interval is None or comparison.difference is None:
        return False
    return interval[0] > 0.0 if comparison.difference > 0.0 else interval[1] < 0.0


def _sure(study: Study) -> str:
    most = (
        f"How sure: if no way differed from any other, at most {percent(study.alpha)} of such studies would call any "
        "of them better or worse"
    )
    if not study.exploratory:
        shown = "was planned, but no ledger shows it" if study.is_unverified else "was registered before the runs"
        return f"{most}. What would be measured, and how, {shown}."
    why = "No plan was registered before the runs" if study.plan is None else "The registered plan was not kept to"
    return f"{most}. {why}, so take this as a hint: a campaign planned for it can confirm it."


def _typical(study: Study) -> str:
    side = "lower" if study.direction == "lower" else "higher"
    told = f"Better means {side} in a typical training, not in each one: look at the worst seeds too."
    frail = [each.condition for each in study.comparisons if each.lost and not each.lost.survives]
    if frail:
        return f"{told} Counting the runs that were lost as bad ones changes the answer for {_listed(frail)}."
    return told


def _listed(names: Sequence[str]) -> str:
    more = [f"{len(names) - MOST_NAMED} more"] * (len(names) > MOST_NAMED)
    *first, last = [*names[:MOST_NAMED], *more]
    return f"{', '.join(first)} and {last}" if first else last
