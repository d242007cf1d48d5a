"""Two checks on a verdict: a second line with lost runs at the worst value, and controls that "better" must beat.

If crashes depend on the condition, dropping them is wrong in up to 14 % of campaigns without any difference; at the
worst value they count against the condition that lost them. It costs power, so that line only accompanies the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from retrain.records.run import Control, control_label, control_of_record
from retrain.records.runs.curves import Direction, Metric, shown_difference
from retrain.records.runs.run_status import DONE, LIVE
from retrain.records.runs.source import Candidate, Source
from retrain.verdicts.stats.flip import at_most
from retrain.verdicts.study.comparison import (
    Comparison,
    ControlResult,
    ControlsView,
    Lost,
    Values,
    Verdict,
    VerdictReason,
    per_seed,
)
from retrain.verdicts.study.factorial import Factorial
from retrain.verdicts.study.judge import Pairing, holm, judge, with_values

PENDING = (*LIVE, "not started")  # these may still end well
Judged = Callable[[Sequence[Pairing]], Sequence[Comparison]]


def lost_seeds(
    candidates: Iterable[Candidate], values: Mapping[str, Values], *, is_cut: bool
) -> dict[str, tuple[int, ...]]:
    """Return the seeds of each condition without a number although their run ended: it failed, died or stopped.

    A run that continues or has not begun is not lost, nor, where the curves are cut at a given budget (`is_cut`), one
    that was done before it.
    """
    lost: dict[str, dict[int, None]] = {label: {} for label in values}
    for each in candidates:
        is_short = is_cut and each.state == DONE and not each.problem
        is_open = each.state in PENDING or is_short
        if each.seed is not None and each.seed not in values[each.condition] and not is_open:
            lost[each.condition][each.seed] = None
    return {label: tuple(seeds) for label, seeds in lost.items()}


def with_lost(
    comparisons: Sequence[Comparison],
    pairings: Sequence[Pairing],
    values: Mapping[str, Values],
    lost_seeds: Mapping[str, Sequence[int]],
    *,
    direction: Direction,
    judged: Judged,
    factorial: Factorial,
) -> tuple[Comparison, ...]:
    """Return the comparisons, with the second line where runs were lost: the test with the worst value of all runs."""
    seen = [value for by_seed in values.values() for value in by_seed.values()]
    if not seen or not any(lost_seeds.values()):
        return tuple(comparisons)
    worst = min(seen) if direction is Direction.HIGHER else max(seen)
    filled = factorial.with_mixtures(
        {label: {**known, **dict.fromkeys(lost_seeds.get(label, ()), worst)} for label, known in values.items()}
    )
    again = judged([with_values(each, filled[each.baseline], filled[each.condition]) for each in pairings])
    found = []
    for first, second in zip(comparisons, again, strict=True):
        left, right = (
            tuple(dict.fromkeys(seed for label in factorial.parts(each) for seed in lost_seeds.get(label, ())))
            for each in (first.baseline, first.condition)
        )
        fields = ("seeds", "difference", "interval", "level", "p_holm", "verdict")
        lost = Lost(
            baseline_seeds=left,
            condition_seeds=right,
            worst=worst,
            survives=second.verdict is first.verdict,
            **{name: getattr(second, name) for name in fields},
        )
        found.append(replace(first, lost=lost) if left or right else first)
    return tuple(found)


def with_seeds(
    comparisons: Sequence[Comparison], values: Mapping[str, Values], *, direction: Direction
) -> tuple[Comparison, ...]:
    found = []
    for each in comparisons:
        own = values[each.baseline]
        ordered = {seed: own[seed] for seed in (*each.seeds, *own)}
        found.append(replace(each, per_seed=per_seed(ordered, values[each.condition], direction=direction)))
    return tuple(found)


def controls_in(source: Source) -> dict[str, tuple[str, Control]]:
    """Return the conditions that are controls: label to the condition that each is a control of, and which control.

    Labels of the plan count too, so that a planned control cannot be removed without a trace.
    """
    planned = source.plan.conditions if source.plan else ()
    labels = dict.fromkeys([*source.conditions, *planned])
    # A label may end like a control's by chance: the run itself must have recorded it.
    first = {each.condition: each.record for each in reversed(source.candidates) if each.record}
    named = ((control_label(of, control), of, control) for of in labels for control in Control)
    return {
        label: (of, control)
        for label, of, control in named
        if label in labels and (label not in first or control_of_record(first[label]) == control)
    }


def with_controls(
    comparisons: Sequence[Comparison],
    controls: Mapping[str, tuple[str, Control]],
    pairing: Callable[[str, str], Pairing],
    *,
    alpha: float,
    direction: Direction,
) -> tuple[Comparison, ...]:
    """Return the comparisons; "better" becomes "cannot tell" unless the condition beats each of its controls, too.

    "C is better" then claims that C beats its baseline and each of its controls. It is false when any of these null
    hypotheses holds, so the largest of their p values is a valid p for it (an intersection-union test, Berger 1982),
    and Holm's correction runs over these p values, one per comparison: controls cost seeds, but no comparison of the
    correction, and the chance of any false verdict stays at most `alpha`. A control counts in the study as soon as one
    condition has it: a condition without it, as under another baseline than the planned one, has not beaten it.
    `pairing(control, condition)` pairs two conditions by their labels.
    """
    if not controls:
        return tuple(comparisons)
    wanted = [control for control in Control if any(name is control for _, name in controls.values())]
    tried = {
        label: tuple(
            _result(pairing(control_label(label, each), label), each, alpha=alpha, direction=direction)
            for each in wanted
        )
        for label in dict.fromkeys(each.condition for each in comparisons)
    }
    p_M = [_p(each, tried[each.condition], direction) for each in comparisons]
    judged = []
    for each, p_holm in zip(comparisons, holm(p_M), strict=True):
        view = ControlsView(results=tried[each.condition], p_holm=p_holm, alpha=alpha)
        if each.verdict in (Verdict.BETTER, Verdict.WORSE) and not at_most(p_holm, alpha):
            lost = each.lost and replace(each.lost, verdict=Verdict.CANNOT_TELL, survives=True)
            each = replace(each, verdict=Verdict.CANNOT_TELL, cause=VerdictReason.NOT_BEYOND_CONTROL, lost=lost)
        judged.append(replace(each, controls=view))
    return tuple(judged)


def controls_sentence(comparison: Comparison, metric: Metric) -> str:
    """Return `not better than its control random_reward (+1.2 pp over it, p = 0.4)`; empty without a control."""
    view = comparison.controls
    if view is None:
        return ""
    if unbeaten := [each for each in view.results if not each.is_beaten]:
        return f"not better than its {_listed(unbeaten, metric)}"
    if comparison.cause is VerdictReason.NOT_BEYOND_CONTROL:
        return f"with the controls of all conditions the corrected p is {view.p_holm:.2g}, above {view.alpha:g}"
    return f"better than its {_listed(view.results, metric)}"


def _listed(results: Sequence[ControlResult], metric: Metric) -> str:
    found = []
    for each in results:
        p = "nothing to test" if each.p is None else f"p = {each.p:.2g}"
        size = f"{shown_difference(each.difference, metric)} over it, {p}"
        found.append(f"{each.control} ({'no finished run to compare with' if each.difference is None else size})")
    return f"control{'s' if len(found) > 1 else ''} {', '.join(found)}"


def _result(pairing: Pairing, control: Control, *, alpha: float, direction: Direction) -> ControlResult:
    [judged] = judge([pairing], alpha=alpha, direction=direction)
    return ControlResult(
        control=str(control),
        label=pairing.baseline,
        seeds=judged.seeds,
        difference=judged.difference,
        interval=judged.interval,
        p=judged.p,
        is_beaten=judged.verdict is Verdict.BETTER,
    )


def _p(comparison: Comparison, results: Sequence[ControlResult], direction: Direction) -> float:
    """Return the p value of a verdict's claim: with "better" the weakest of its tests."""
    own = 1.0 if comparison.p is None else comparison.p
    sign = 1.0 if direction is Direction.HIGHER else -1.0
    if comparison.difference is None or sign * comparison.difference <= 0.0:
        return own
    return max([own, *(each.p if each.is_beaten and each.p is not None else 1.0 for each in results)])
