"""Chooses the test that decides: of a fixed number of seeds, of planned looks, or valid at any time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from retrain.kernel.types import Floats
from retrain.records.runs.registered import Spend
from retrain.records.runs.run_status import DONE
from retrain.records.runs.source import Source
from retrain.verdicts.stats.sequential import AnytimeTest, SequentialFlip, fewest_equal
from retrain.verdicts.study.comparison import Comparison, DecidingTest, Design, LooksView, Verdict
from retrain.verdicts.study.judge import Pairing


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """The test of every pairing of one study, chosen from the plan, the campaign's record and the earlier looks.

    `seeds` are in the order in which they were planned or added. `ended` are the runs that are done or failed for good.
    """

    design: Design
    seeds: tuple[int, ...]
    reason: str = ""
    earlier: tuple[int, ...] = ()
    planned: tuple[int, ...] = ()
    spend: Spend = Spend.POCOCK
    ended: frozenset[tuple[str, int]] = frozenset()

    def prepared(self, pairing: Pairing) -> Pairing:
        """Return the pairing with its seeds in that order, and with its test."""
        place = {seed: index for index, seed in enumerate(self.seeds)}
        order_N = sorted(range(len(pairing.seeds)), key=lambda index: place.get(pairing.seeds[index], len(place)))
        return replace(
            pairing,
            seeds=tuple(pairing.seeds[index] for index in order_N),
            baseline_N=pairing.baseline_N[order_N],
            condition_N=pairing.condition_N[order_N],
            test_of=self.test_of(pairing.baseline, pairing.condition),
            is_paired=self.design is not Design.UNPAIRED,
        )

    def test_of(self, baseline: str, condition: str) -> Callable[[Sequence[int], Floats], DecidingTest] | None:
        """Return a function that makes the test of two conditions from their common seeds, in order."""
        if self.design in (Design.FIXED, Design.UNPAIRED):
            return None
        if self.design is Design.ANYTIME:
            return lambda seeds, diffs_N: AnytimeTest(diffs_N=diffs_N)
        taken = self.taken(baseline, condition)

        def planned(seeds: Sequence[int], diffs_N: Floats) -> DecidingTest:
            known = set(seeds)
            return SequentialFlip(
                diffs_N=diffs_N,
                counts_K=[len(known & set(self.seeds[:look])) for look in taken],
                shares_K=[look / self.planned[-1] for look in taken],
                n_max=self.planned[-1],
                spend=self.spend,
            )

        return planned

    def taken(self, baseline: str, condition: str) -> tuple[int, ...]:
        """Return the planned looks at two conditions that can have been taken: every run up to them has ended."""
        both = (baseline, condition)
        has_ended = [all((label, seed) in self.ended for label in both) for seed in self.seeds]
        first = has_ended.index(False) if False in has_ended else len(has_ended)
        return tuple(look for look in self.planned if look <= first)

    def view(self, comparison: Comparison, pairing: Pairing) -> Comparison:
        """Return the comparison with its looks, and the least seeds of the test that decided."""
        if self.design is not Design.PLANNED:
            comparison = replace(
                comparison, looks=LooksView(design=self.design, reason=self.reason, taken=self.earlier)
            )
            if self.design is not Design.ANYTIME:
                return comparison
            return replace(comparison, least_seeds=fewest_equal(comparison.alpha / comparison.num_comparisons))
        taken, decided = self.taken(comparison.baseline, comparison.condition), None
        test = pairing.test_of(pairing.seeds, pairing.diffs_N) if pairing.test_of else None
        if comparison.verdict is not Verdict.CANNOT_TELL and isinstance(test, SequentialFlip):
            # Holm may have granted more alpha than its first step does; the look is that of the p value itself.
            decided = test.rejected_at(test.p)
        view = LooksView(
            design=self.design,
            planned=self.planned,
            taken=taken,
            spend=self.spend.value,
            decided_after=None if decided is None else taken[decided],
        )
        return replace(comparison, looks=view)


def chosen_looks(source: Source, earlier: Sequence[int] = ()) -> Looks:
    """Choose the test for these runs.

    `planned looks` with an intact plan that has them and no seeds beyond it. `fixed`, or `unpaired` if an intact plan
    says so, where the seeds are those of a plan without looks, or where nothing shows an earlier look at fewer.
    Otherwise `anytime`: seeds were added to the campaign, or `earlier` has looks at fewer seeds, by their number.
    """
    plan, seeds = source.plan, _in_order(source)
    done = Counter(each.condition for each in source.candidates if each.state == DONE)
    compared = min((done[label] for label in source.conditions if done[label]), default=0)
    fewer = tuple(sorted({number for number in earlier if 0 < number < compared}))
    runs = [(each, (each.condition, each.seed)) for each in source.candidates if each.seed is not None]
    ended = frozenset(cell for each, cell in runs if each.has_ended)
    has_pending = len(ended) < len({cell for _, cell in runs})
    unplanned = len(set(seeds) - set(plan.seeds)) if plan else len(source.added_seeds)
    if plan and plan.looks and plan.is_intact and not unplanned:
        planned = Looks(design=Design.PLANNED, seeds=plan.seeds, earlier=fewer, ended=ended)
        return replace(planned, planned=plan.looks, spend=plan.spend)
    reason = ""
    if unplanned:
        reason = f"{unplanned} seed{'s were' if unplanned > 1 else ' was'} added without planned looks"
    elif plan and plan.looks:
        reason = "the plan was changed after it was sealed"
    elif fewer and not (plan and set(plan.seeds) == set(seeds) and not has_pending):
        reason = f"an earlier look at {', '.join(map(str, fewer))} seeds is on record"
    is_unpaired = plan is not None and plan.is_unpaired and plan.is_intact
    design = Design.ANYTIME if reason else Design.UNPAIRED if is_unpaired else Design.FIXED
    return Looks(design=design, seeds=seeds, reason=reason, earlier=fewer, ended=ended)


def _in_order(source: Source) -> tuple[int, ...]:
    """Return seeds by the start of their first run; added ones last, wherever the file lists them."""
    began: dict[int, float] = {}
    for each in source.candidates:
        if each.seed is not None:
            time_s = each.started.timestamp() if each.started else math.inf
            began[each.seed] = min(time_s, began.get(each.seed, math.inf))
    seeds = sorted(began, key=began.__getitem__)
    added = dict.fromkeys(seed for seed in source.added_seeds if seed in seeds)
    return (*(seed for seed in seeds if seed not in added), *added)


def looks_sentence(view: LooksView) -> str:
    """Return the looks taken and the test that allows for them; empty for one look at a fixed number of seeds."""
    match view.design:
        case Design.FIXED:
            return ""
        case Design.UNPAIRED:
            return "judged by the planned permutation test of unpaired runs"
        case Design.ANYTIME:
            return f"judged by a stricter test, because {view.reason}"
    looked = f"{len(view.taken)} of {len(view.planned)} planned looks taken ({view.spend} spending)"
    if view.decided_after is not None:
        return f"decided at the planned look of {view.decided_after} seeds; {looked}"
    return f"{looked}; the next is at {view.next_look} seeds" if view.next_look else looked
