"""One condition against its baseline: the verdict and its grounds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from retrain.verdicts.stats import power
from retrain.verdicts.stats.components import Advice, Components
from retrain.verdicts.study.per_seed import PerSeed


class DecidingTest(Protocol):
    @property
    def p(self) -> float:
        """Two-sided p value, before Holm's correction."""

    @property
    def smallest_p(self) -> float:
        """The least possible p with as many seeds."""

    def interval(self, level: float) -> tuple[float, float]:
        """Return an interval of the mean difference that leaves out zero exactly where p <= 1 - level."""


class Design(StrEnum):
    """The kind of test that decides."""

    FIXED = "fixed"
    UNPAIRED = "unpaired"
    PLANNED = "planned looks"
    ANYTIME = "anytime"


@dataclass(frozen=True, slots=True, kw_only=True)
class LooksView:
    """The looks taken at one comparison, and the test that allows for them.

    With planned looks: `planned` and `taken` are numbers of seeds, `decided_after` the look of the verdict. With
    `anytime`: `taken` are the earlier looks on record, and `reason` says what was not planned.
    """

    design: Design
    reason: str = ""
    planned: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()
    spend: str | None = None
    decided_after: int | None = None

    @property
    def next_look(self) -> int | None:
        return next((look for look in self.planned if look > max(self.taken, default=0)), None)


class Verdict(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    PRACTICALLY_SAME = "practically the same"  # only with a planned margin
    CANNOT_TELL = "cannot tell"


class VerdictReason(StrEnum):
    FOUND = "found"
    TOO_FEW = "too few seeds"  # with this many seeds no data could give another verdict
    NOT_SIGNIFICANT = "not significant"
    WITHIN = "within the margin"
    FOUND_WITHIN = "found, but within the margin"
    NOT_BEYOND_CONTROL = "not better than its controls"  # it beats its baseline, but not all of its controls


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The second line of a comparison, with lost runs at `worst`: the same test over the seeds that this completes.

    `survives`: its verdict is that of the first line.
    """

    baseline_seeds: tuple[int, ...]
    condition_seeds: tuple[int, ...]
    worst: float
    seeds: tuple[int, ...]
    difference: float | None
    interval: tuple[float, float] | None
    level: float
    p_holm: float | None
    verdict: Verdict
    survives: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlResult:
    """A condition against one of its controls, over their common seeds.

    `difference` is condition minus control with its `interval`, `p` that of the deciding test, before any correction;
    None without data, as with a control that has no finished run. `is_beaten`: the condition is on the better side,
    with p at most alpha.
    """

    control: str
    label: str
    seeds: tuple[int, ...]
    difference: float | None
    interval: tuple[float, float] | None
    p: float | None
    is_beaten: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlsView:
    """All controls of one condition. `p_holm` decides about "better": see `with_controls`."""

    results: tuple[ControlResult, ...]
    p_holm: float
    alpha: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FewSeeds:
    """An estimate where seeds are too few for a verdict: `interval` at `level` assumes roughly normal seeds.

    It is about new seeds, and about new examples too if `is_of_examples`. It decides nothing.
    """

    interval: tuple[float, float]
    level: float
    is_of_examples: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamplesView:
    """A difference over new seeds and new examples of the same kind, by crossed random effects; see `stats.crossed`.

    `interval` is at `level`, and never narrower than the one over seeds, which assumes no distribution; nor is `p`
    smaller. `normal` is the interval at 1 - alpha by crossed effects only. With clusters, `num_clusters` <
    `num_examples`, new examples means new clusters. `advice` exists while the interval holds zero. With a `reason`
    there is no such view: everything else is None or 0; `are_others` if both sides have different examples.
    """

    reason: str = ""
    are_others: bool = False
    num_seeds: int = 0
    num_examples: int = 0
    num_clusters: int = 0
    estimate: float | None = None
    interval: tuple[float, float] | None = None
    level: float | None = None
    normal: tuple[float, float] | None = None
    p: float | None = None
    components: Components | None = None
    advice: Advice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The verdict on one pairing; numbers that cannot be computed are None.

    `difference` is condition minus baseline and `interval` its interval at `level`, infinite where seeds are too few:
    that level belongs to the comparison's step of Holm's correction, so the interval leaves out zero exactly where the
    verdict is better or worse. `p_holm` is the corrected p that decides, `smallest_p` the least p with these seeds.
    `detectable` is the true difference found in 80 % of studies like this one, `seeds_needed` the seeds that the
    observed difference needs for that, both at `alpha / comparisons`; `least_seeds` are the fewest for any verdict.
    Within the planned `margin` both are practically the same. `lost` exists if runs were lost, `few_seeds` if three
    seeds or more are too few for a verdict.
    """

    baseline: str
    condition: str
    seeds: tuple[int, ...]
    difference: float | None
    interval: tuple[float, float] | None
    level: float
    p: float | None
    p_holm: float | None
    smallest_p: float
    d_z: float | None
    d_pooled: float | None
    detectable: float | None
    least_seeds: int
    verdict: Verdict
    cause: VerdictReason
    alpha: float
    num_comparisons: int
    margin: float | None = None
    per_seed: PerSeed | None = None
    lost: Lost | None = None
    controls: ControlsView | None = None
    looks: LooksView | None = None
    examples: ExamplesView | None = None
    few_seeds: FewSeeds | None = None

    @property
    def seeds_needed(self) -> int | None:
        return power.seeds_needed(self.d_z, self.alpha / self.num_comparisons) if self.d_z else None
