"""The planned looks of a running campaign: which runs may start before the next one, and its decision.

A look is taken when every run that it needs has ended, and depends only on the records of these runs and of the looks
before it: a campaign that was killed takes the same look again, and comes to the same decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.campaign.load import Campaign
from retrain.campaign.planned import PlannedRun
from retrain.text.amounts import counted

if TYPE_CHECKING:
    from retrain.verdicts.study.study import Study

FUTILE_BELOW = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look after `seeds` seeds. `closed` are the conditions that get no more seeds, with the reason.

    `open` are those that continue, with the chance of a verdict by the last look where there is a trend; `lost` are
    runs that failed for good before the look.
    """

    seeds: int
    closed: Mapping[str, str]
    open: Mapping[str, float | None]
    lost: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        parts = [f"{label}: {reason}" for label, reason in self.closed.items()]
        for label, chance in self.open.items():
            power = "" if chance is None else f", {100 * chance:.0f} % chance of a verdict"
            parts.append(f"{label}: cannot tell{power}")
        parts += [f"{counted(len(self.lost), 'run')} lost"] if self.lost else []
        return f"look after {self.seeds} seeds: {'; '.join(parts)}"


# Takes a look at the conditions that are open after so many seeds: a pure function of the runs in the folder.
Judge = Callable[[int, Sequence[str]], Look]


class PlannedLooks:
    """The looks of one campaign, including earlier sessions' (`taken`)."""

    def __init__(self, campaign: Campaign, judge: Judge, taken: Sequence[Mapping[str, Any]] = ()) -> None:
        plan = campaign.table.plan
        self._sizes = tuple(plan.looks) if plan else ()
        self._baseline = (plan.baseline if plan else "") or campaign.labels[0]
        own = {each.condition.number: each.label for each in campaign.conditions if not each.condition.control}
        # Of a factorial the effects are followed; each of them needs every condition.
        self._labels = campaign.effects() or [label for label in own.values() if label != self._baseline]
        self._followed = {each.label: own.get(each.condition.number, each.label) for each in campaign.conditions}
        self._place = {seed: place for place, seed in enumerate(campaign.table.seeds)}
        self._judge = judge
        self.taken = [dict(look) for look in taken]

    @property
    def due(self) -> int | None:
        """Seeds of the next look; None when no condition is open, or the last look was taken."""
        after = max((look["seeds"] for look in self.taken), default=0)
        return next((size for size in self._sizes if size > after), None) if self.open_labels else None

    @property
    def open_labels(self) -> list[str]:
        """Conditions that have no verdict and may still come to one."""
        closed = self._closed_after()
        return [label for label in self._labels if label not in closed]

    def may_start(self, run: PlannedRun) -> bool:
        """True if the run belongs to the next look, or to an earlier one."""
        due = self.due
        return self.is_needed(run) and (due is None or self._place[run.seed] < due)

    def is_needed(self, run: PlannedRun) -> bool:
        """True unless a look has closed the run's condition before its seed."""
        closed = self._closed_after()
        # A control gets the seeds of its condition.
        label = self._followed[run.condition.label]
        if label not in self._labels and not self.open_labels:
            return self._place[run.seed] < max(closed.values(), default=len(self._place))
        return self._place[run.seed] < closed.get(label, len(self._place))

    def take(self) -> Look:
        """Take the look that is due. ConfigError when nothing can be compared."""
        seeds = self.due
        assert seeds is not None, "no look is due"
        look = self._judge(seeds, self.open_labels)
        self.taken.append(asdict(look))
        return look

    def _closed_after(self) -> dict[str, int]:
        return {label: look["seeds"] for look in self.taken for label in look["closed"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyJudge:
    """Looks as `retrain compare` does: with metric, alpha and baseline of the sealed plan, and recorded in the ledger.

    The ledger has a look at the same records once, however often it is repeated.
    """

    folder: Path
    seeds: Sequence[int]
    looks: Sequence[int]
    spend: str

    @classmethod
    def of(cls, campaign: Campaign, folder: Path) -> StudyJudge | None:
        """The judge of a campaign whose plan has looks, otherwise None."""
        plan = campaign.table.plan
        if plan is None or not plan.looks:
            return None
        return cls(folder=folder, seeds=tuple(campaign.table.seeds), looks=tuple(plan.looks), spend=plan.spend)

    def __call__(self, seeds: int, open_labels: Sequence[str]) -> Look:
        """Close the conditions with a verdict, and those with less than a 5 % chance of one by the last look."""
        from retrain.verdicts.study.comparison import Verdict  # needed only at looks
        from retrain.verdicts.study.comparison_with_ledger import comparison_with_ledger
        from retrain.verdicts.study.study import Options

        study = comparison_with_ledger([self.folder], Options())
        verdicts = {each.condition: each.verdict for each in study.comparisons}
        undecided = sum(verdict is Verdict.CANNOT_TELL for verdict in verdicts.values())
        closed: dict[str, str] = {}
        going_on: dict[str, float | None] = {}
        for label in open_labels:
            verdict = verdicts.get(label, Verdict.CANNOT_TELL)
            if verdict is not Verdict.CANNOT_TELL:
                closed[label] = str(verdict)
                continue
            chance = self._chance(study, label, seeds, undecided)
            if chance is not None and chance < FUTILE_BELOW:
                closed[label] = f"futile: {100 * chance:.1f} % chance of a verdict by {self.looks[-1]} seeds"
            else:
                going_on[label] = chance
        first = set(self.seeds[:seeds])
        lost = sorted(each.name for each in study.left_out if each.seed in first)
        return Look(seeds=seeds, closed=closed, open=going_on, lost=tuple(lost))

    def _chance(self, study: Study, label: str, seeds: int, undecided: int) -> float | None:
        """The chance of a verdict by the last look; None at the last look, and without a trend.

        "Better" has to be found against the baseline and each control: its chance is at most the least of these.
        """
        from retrain.records.runs.curves import Direction

        if seeds >= self.looks[-1]:
            return None
        alpha = study.alpha / max(1, undecided)
        baseline = next((each.baseline for each in study.comparisons if each.condition == label), study.baseline)
        powers = self._powers(study, label, baseline, seeds, alpha)
        if powers is None:
            return None
        controls = [
            each.label
            for found in study.comparisons
            if found.condition == label and found.controls
            for each in found.controls.results
        ]
        known = filter(None, (self._powers(study, label, each, seeds, alpha) for each in controls))
        is_higher = study.direction is Direction.HIGHER
        better = min(each[is_higher] for each in (powers, *known))
        return powers[not is_higher] + better

    def _powers(self, study: Study, label: str, other: str, seeds: int, alpha: float) -> tuple[float, float] | None:
        """The chances that the last look finds the condition below and above another one."""
        import numpy as np

        from retrain.records.runs.registered import Spend
        from retrain.verdicts.stats.sequential import conditional_powers

        values = study.values
        left, right = values.get(other, {}), values.get(label, {})
        common = [seed for seed in self.seeds if seed in left and seed in right]
        return conditional_powers(
            np.array([right[seed] - left[seed] for seed in common]),
            counts_K=[len(set(common) & set(self.seeds[:look])) for look in self.looks if look <= seeds],
            looks=self.looks,
            spend=Spend(self.spend),
            alpha=alpha,
        )
