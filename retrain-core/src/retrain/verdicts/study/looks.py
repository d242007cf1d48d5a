"""Chooses the test that decides: of a fixed number of seeds, of planned looks, or valid at any time; and its reach."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from retrain.kernel.types import Floats
from retrain.records.runs.registered import Spend
from retrain.records.runs.run_status import DONE
from retrain.records.runs.source import Source
from retrain.text.amounts import counted
from retrain.verdicts.stats.flip import EXACT_EXCHANGES, EXACT_SEEDS, at_most, fewest_exchanged, patterns_for
from retrain.verdicts.stats.paired import least_seeds
from retrain.verdicts.stats.sequential import AnytimeTest, SequentialFlip, fewest_equal
from retrain.verdicts.study.comparison import Comparison, DecidingTest, Design, LooksView, Verdict
from retrain.verdicts.study.judge import Pairing


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """The test of every pairing of one study; `seeds` in the order planned or added, `ended` are done or failed."""

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
        # In planned order: one seed that still runs holds up all later looks, so that no fast run decides early.
        first = has_ended.index(False) if False in has_ended else len(has_ended)
        return tuple(look for look in self.planned if look <= first)

    def view(self, comparison: Comparison, pairing: Pairing) -> Comparison:
        """Return the comparison with its looks, and the least seeds of the test that decided."""
        if self.design is not Design.PLANNED:
            least, looks = comparison.least_seeds, LooksView(design=self.design, reason=self.reason, taken=self.earlier)
            if self.design is Design.ANYTIME:
                least = fewest_equal(comparison.alpha / comparison.num_comparisons)
            return replace(comparison, least_seeds=least, looks=looks)
        taken, decided = self.taken(comparison.baseline, comparison.condition), None
        test = pairing.test_of(pairing.seeds, pairing.diffs_N) if pairing.test_of else None
        if comparison.verdict is not Verdict.CANNOT_TELL and isinstance(test, SequentialFlip):
            # Holm may have granted more alpha than its first step does; the look belongs to the p value itself.
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
    says so, where the seeds belong to a plan without looks, or where nothing shows an earlier look at fewer.
    Otherwise `anytime`: seeds were added to the campaign, or `earlier` has looks at fewer seeds, by their number.
    """
    began: dict[int, float] = {}  # of each seed, its first run
    for each in source.candidates:
        if each.seed is not None:
            time_s = each.started.timestamp() if each.started else math.inf
            began[each.seed] = min(time_s, began.get(each.seed, math.inf))
    # Added seeds come last, wherever the file lists them.
    added = dict.fromkeys(seed for seed in source.added_seeds if seed in began)
    seeds = (*(seed for seed in sorted(began, key=began.__getitem__) if seed not in added), *added)
    plan = source.plan
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The clearest result that a number of seeds allows: the same difference in all of them.

    `smallest_p` is of one comparison, before Holm's correction. `idle_looks` are planned looks that no result could
    end, `first_look` the fewest seeds after which a first look can.
    """

    design: Design
    num_seeds: int
    comparisons: int
    alpha: float
    smallest_p: float
    fewest_seeds: int
    idle_looks: tuple[int, ...] = ()
    first_look: int | None = None

    @property
    def can_decide(self) -> bool:
        return at_most(self.comparisons * self.smallest_p, self.alpha)


def reach_of(
    design: Design,
    *,
    num_seeds: int,
    comparisons: int,
    alpha: float,
    looks: Sequence[int] = (),
    spend: Spend = Spend.POCOCK,
) -> Reach:
    """Return the reach of `num_seeds` seeds per condition under the test of `design` with the planned `looks`."""
    share = alpha / comparisons

    def can_end(*taken: int) -> bool:
        return at_most(_at_looks(taken, looks, spend), share)

    idle = [look for number, look in enumerate(looks, start=1) if not can_end(*looks[:number])]
    fewest = {Design.UNPAIRED: fewest_exchanged, Design.ANYTIME: fewest_equal}.get(design, least_seeds)
    return Reach(
        design=design,
        num_seeds=num_seeds,
        comparisons=comparisons,
        alpha=alpha,
        smallest_p=_at_looks(looks, looks, spend) if looks else _smallest_p(design, num_seeds, comparisons, alpha),
        fewest_seeds=fewest(share),
        idle_looks=tuple(idle),
        first_look=next(filter(can_end, range(1, looks[-1] + 1)), None) if idle else None,
    )


def reach_sentences(reach: Reach) -> list[str]:
    """Return warnings before the first run, with a fix; empty where the plan can reach a verdict."""
    if reach.can_decide:
        looks, first = ", ".join(map(str, reach.idle_looks)), reach.first_look
        told = f"no result can end the look after {looks} seeds; begin with a look after {first} or more"
        return [told] if looks else []
    holm = ""
    if reach.comparisons > 1:
        corrected = min(1.0, reach.comparisons * reach.smallest_p)
        holm = f" ({corrected:.2g} after Holm's correction over {reach.comparisons} comparisons)"
    seeds = counted(reach.num_seeds, "seed")
    fix = f"plan at least {reach.fewest_seeds}"
    if reach.design is Design.FIXED and reach.num_seeds >= fewest_exchanged(reach.alpha / reach.comparisons):
        fix += ', or [campaign.plan] test = "unpaired"'
    return [f"no verdict is possible. {seeds}: smallest possible p {reach.smallest_p:.2g}{holm}; {fix}"]


def _smallest_p(design: Design, num_seeds: int, comparisons: int, alpha: float) -> float:
    if num_seeds < 2:
        return 1.0
    drawn = 1.0 / patterns_for(comparisons, alpha)
    if design is Design.ANYTIME:
        return AnytimeTest(diffs_N=np.ones(num_seeds)).p
    if design is Design.UNPAIRED:
        return 2.0 / math.comb(2 * num_seeds, num_seeds) if num_seeds <= EXACT_EXCHANGES else drawn
    return 2.0 ** -(num_seeds - 1) if num_seeds <= EXACT_SEEDS else drawn


def _at_looks(taken: Sequence[int], looks: Sequence[int], spend: Spend) -> float:
    """Return the least p after these looks of the planned ones."""
    test = SequentialFlip(
        diffs_N=np.ones(taken[-1]),
        counts_K=list(taken),
        shares_K=[look / looks[-1] for look in taken],
        n_max=looks[-1],
        spend=spend,
    )
    return test.smallest_p
