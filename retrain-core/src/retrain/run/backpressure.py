"""Back pressure, the pacer `usl`: sets the prompts of the next step from the throughput of earlier steps."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from retrain.kernel.config.plugin_tables import BackpressureTable
from retrain.kernel.declared import MetricSpec

if TYPE_CHECKING:
    from retrain.kernel.contracts.context import PluginContext
    from retrain.kernel.contracts.views import PaceView

LOG = logging.getLogger("retrain")
HOLD, INCREASE, THROTTLE = "hold", "increase", "throttle"
# Averages the completion length over about the last five steps, because one step's mean is noisy.
LENGTH_DECAY = 0.8


def build(context: PluginContext) -> UslPacer:
    """The pacer that `[backpressure]` describes, beginning at `[training] batch_size`."""
    config = context.config
    table = config.backpressure
    batch_size = config.training.batch_size
    pacer = UslPacer(table, batch_size=batch_size, group_size=config.training.group_size)
    LOG.info(
        "Back pressure: the batch size follows measured throughput, between %d and %d prompts; measured times differ "
        "from run to run, so the seed does not reproduce this run.",
        table.min_batch_size,
        table.max_batch_size,
    )
    if pacer.configured != batch_size:
        LOG.warning("Back pressure: [training] batch_size = %d is outside these bounds.", batch_size)
    return pacer


class UslPacer:
    """Sweeps 1, 2, 4, ... prompts, fits the curve, and steers to `throttle_margin` of its peak.

    With p = batch size x group size and target = throttle_margin p*: p > target throttles to the target, p <
    increase_margin x target increases to it, anything between holds. Throttling never raises the batch size and
    increasing never lowers it. Running out of memory sets a permanent ceiling. `group_size` never changes.
    """

    def __init__(self, table: BackpressureTable, *, batch_size: int, group_size: int) -> None:
        self._table = table
        self._group_size = group_size
        self.configured = min(max(batch_size, table.min_batch_size), table.max_batch_size)
        peaks = table.peak_gflops, table.peak_bw_gb_s
        self._roofline = Roofline(peak_gflops=peaks[0], peak_bw_gb_s=peaks[1]) if min(peaks) > 0.0 else None
        self._sweep = _sweep(table.min_batch_size, table.max_batch_size)
        self._window = Window()
        self._batch_size = self.configured
        self._ceiling = table.max_batch_size
        self._largest_worked = 0
        self._steps = 0
        self._action = HOLD
        self._throughput = 0.0
        self._mean_tokens = 0.0
        self._fit: Scaling | None = None
        self._p = 0
        # The first step of a process compiles, allocates and reads files: its time means nothing.
        self._is_cold = True

    def batch_size(self, step: int) -> int:
        if self._steps < self._table.warmup_steps:
            return min(self._sweep[self._steps % len(self._sweep)], self._ceiling)
        return self._batch_size

    def observe(self, view: PaceView) -> None:
        """Learn from a step; one without an optimizer step only advances the sweep."""
        self._p = view.batch_size * view.group_size
        if view.out_of_memory:
            self._lower_ceiling(view.batch_size)
            return
        self._steps += 1
        if view.has_trained and view.sampled_tokens > 0 and view.step_time_s > 0.0:
            self._measure(view)
        self._fit = fit_usl(self._window.comparable(self._mean_tokens), relative=True)
        self._action = HOLD
        if self._steps >= self._table.warmup_steps:
            self._decide()

    def metrics(self) -> Mapping[str, float | str | bool]:
        """`bp_*` for the line of the last observed step; a field is absent until it is known."""
        is_warmup = self._steps <= self._table.warmup_steps
        fields: dict[str, float | str | bool] = {
            "bp_warmup": is_warmup,
            "bp_action": self._action,
            "bp_regime": self._regime(is_warmup),
        }
        if self._throughput > 0.0:
            fields["bp_throughput"] = self._throughput
        if self._fit is not None:
            fields |= {"bp_sigma": self._fit.sigma, "bp_kappa": self._fit.kappa}
            if self._fit.p_star != UNBOUNDED:
                fields |= {"bp_p_star": self._fit.p_star, "bp_utilization": self._p / self._fit.p_star}
        if self._ceiling < self._table.max_batch_size:
            fields["bp_ceiling"] = self._ceiling
        return fields

    def state(self) -> Mapping[str, Any]:
        return {
            "batch_size": self._batch_size,
            "ceiling": self._ceiling,
            "largest_worked": self._largest_worked,
            "steps": self._steps,
            "action": self._action,
            "throughput": self._throughput,
            "mean_tokens": self._mean_tokens,
            "p": self._p,
            "samples": self._window.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        table = self._table
        # The resumed configuration may have narrower bounds than the run that saved this.
        self._ceiling = min(max(int(state["ceiling"]), table.min_batch_size), table.max_batch_size)
        self._batch_size = min(max(int(state["batch_size"]), table.min_batch_size), self._ceiling)
        self._largest_worked = int(state["largest_worked"])
        self._steps = int(state["steps"])
        self._action = str(state["action"])
        self._throughput = float(state["throughput"])
        self._mean_tokens = float(state["mean_tokens"])
        self._p = int(state["p"])
        samples = state["samples"]
        self._window = Window([Sample(p=int(p), throughput=x, mean_tokens=length) for p, x, length in samples])
        self._fit = fit_usl(self._window.comparable(self._mean_tokens), relative=True)

    def _measure(self, view: PaceView) -> None:
        self._largest_worked = max(self._largest_worked, view.batch_size)
        if self._is_cold:
            self._is_cold = False
            return
        throughput = view.sampled_tokens / view.step_time_s
        length = view.sampled_tokens / self._p
        self._throughput = _averaged(self._throughput, throughput, self._table.ema_decay)
        self._mean_tokens = _averaged(self._mean_tokens, length, LENGTH_DECAY)
        self._window.add(Sample(p=self._p, throughput=throughput, mean_tokens=length))

    def _decide(self) -> None:
        if self._fit is None:
            return
        target = self._table.throttle_margin * self._fit.p_star
        # The largest batch size whose completions do not exceed the target, within bounds and ceiling.
        wanted = self._ceiling if target == UNBOUNDED else int(target / self._group_size)
        allowed = min(max(wanted, self._table.min_batch_size), self._ceiling)
        p = self._batch_size * self._group_size
        if p > target and allowed < self._batch_size:
            self._batch_size, self._action = allowed, THROTTLE
        elif p < self._table.increase_margin * target and allowed > self._batch_size:
            self._batch_size, self._action = allowed, INCREASE

    def _lower_ceiling(self, failed: int) -> None:
        """Half of the size that did not fit, or the largest that did fit if that is more; always below the former."""
        # Completions grow, so a size that fitted before may fail now. It no longer counts as fitting.
        fitting = self._largest_worked if self._largest_worked < failed else 0
        self._largest_worked = fitting
        self._ceiling = max(self._table.min_batch_size, min(self._ceiling, max(failed // 2, fitting)))
        self._batch_size = min(self._batch_size, self._ceiling)
        self._action = THROTTLE
        LOG.warning(
            "Out of memory with %d prompts x %d completions: back pressure stays at %d prompts or fewer from now on.",
            failed,
            self._group_size,
            self._ceiling,
        )

    def _regime(self, is_warmup: bool) -> str:
        if is_warmup:
            return WARMUP
        if self._fit is None:
            return UNKNOWN
        p_star = self._fit.p_star
        low = self._table.increase_margin * self._table.throttle_margin * p_star
        reachable = min(low, self._ceiling * self._group_size)
        return regime(self._p, p_star, underused_below=reachable, roofline=self._roofline)


def _sweep(smallest: int, largest: int) -> list[int]:
    """1, 2, 4, ... between the bounds, including both bounds."""
    powers = [2**exponent for exponent in range(largest.bit_length())]
    return sorted({smallest, *(power for power in powers if smallest <= power <= largest), largest})


def _averaged(before: float, new: float, decay: float) -> float:
    # 0 means no measurement yet; averaging it in would start the curve too low.
    return new if before == 0.0 else decay * before + (1.0 - decay) * new


WARMUP = "warmup"
UNKNOWN = "unknown"
RETROGRADE = "retrograde"
MEMORY_BOUND = "memory_bound"
COMPUTE_BOUND = "compute_bound"
OPTIMAL = "optimal"
UNDERUSED = "underused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Peak arithmetic in GFLOP/s and peak memory bandwidth in GB/s of one device, both above 0.

    Decoding with bf16 weights reads 2 bytes per weight and does 2 operations with it for every completion in the batch:
    its arithmetic intensity, in FLOP per byte, is the number of concurrent completions (arXiv:2402.16363).
    """

    peak_gflops: float
    peak_bw_gb_s: float

    @property
    def ridge(self) -> float:
        """Intensity, that is concurrent completions, from which on arithmetic is the limit: peak / bandwidth."""
        return self.peak_gflops / self.peak_bw_gb_s

    def bound(self, p: float) -> str:
        return MEMORY_BOUND if p < self.ridge else COMPUTE_BOUND


def regime(p: float, p_star: float, *, underused_below: float, roofline: Roofline | None) -> str:
    """The regime of p concurrent completions: past the peak, or by the roofline, or whether more would help."""
    if p > p_star:
        return RETROGRADE
    if roofline is not None:
        return roofline.bound(p)
    return UNDERUSED if p < underused_below else OPTIMAL


# The curve has three parameters, so fewer different p do not determine it.
MIN_DISTINCT = 3
UNBOUNDED = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """X(p) = rate p / (1 + sigma (p - 1) + kappa p (p - 1)), in tokens per second at p concurrent completions.

    `rate` > 0 is the throughput of a single completion, `sigma` >= 0 the share of work that queues for a resource
    (contention), `kappa` >= 0 the cost of coordinating every pair (coherency; Gunther, Guerrilla Capacity Planning,
    2007).
    """

    sigma: float
    kappa: float
    rate: float

    def throughput(self, p: float) -> float:
        return self.rate * p / (1.0 + self.sigma * (p - 1.0) + self.kappa * p * (p - 1.0))

    @property
    def p_star(self) -> float:
        """The p of the highest throughput, sqrt((1 - sigma) / kappa), at least 1.

        1 when sigma >= 1: a second completion gains nothing. `UNBOUNDED` when kappa is 0: throughput never falls.
        """
        if self.sigma >= 1.0:
            return 1.0
        if self.kappa <= 0.0:
            return UNBOUNDED
        return max(1.0, math.sqrt((1.0 - self.sigma) / self.kappa))


def fit_usl(samples: Sequence[tuple[float, float]], *, relative: bool = False) -> Scaling | None:
    """Least squares on p / X = (1 + sigma (p - 1) + kappa p (p - 1)) / rate over samples (p >= 1, X > 0).

    `relative` weights each sample with X / p, so that errors count as fractions of the throughput: the plain form
    trusts slow samples more than fast ones. p is scaled by its largest value, so the result does not depend on units. A
    negative sigma or kappa (faster than linear) becomes 0. None with fewer than `MIN_DISTINCT` different p, with a
    non-finite number, or when the best curve has no positive rate: there is then no basis for a decision.
    """
    if len({p for p, _ in samples}) < MIN_DISTINCT:
        return None
    p_N, x_N = np.asarray(samples, dtype=np.float64).T
    if not (np.isfinite(p_N).all() and np.isfinite(x_N).all() and p_N.min() >= 1.0 and x_N.min() > 0.0):
        return None
    # p runs to thousands and p^2 to millions: scaled to 1, the columns keep the least squares well conditioned.
    top = p_N.max()
    terms_N3 = np.stack([np.ones_like(p_N), (p_N - 1.0) / top, p_N * (p_N - 1.0) / top**2], axis=1)
    costs_N = p_N / x_N
    # A constant weight does not change the plain solution; it only keeps the numbers near 1.
    weights_N = 1.0 / costs_N if relative else np.full_like(costs_N, 1.0 / costs_N.max())
    solution = np.linalg.lstsq(terms_N3 * weights_N[:, None], costs_N * weights_N, rcond=None)[0]
    inverse_rate, queueing, crosstalk = (float(value) for value in solution)
    # Written so that NaN is refused as well.
    if not inverse_rate > 0.0:
        return None
    sigma, kappa = queueing / top / inverse_rate, crosstalk / top**2 / inverse_rate
    if not all(map(math.isfinite, (sigma, kappa, 1.0 / inverse_rate))):
        return None
    return Scaling(sigma=max(sigma, 0.0), kappa=max(kappa, 0.0), rate=1.0 / inverse_rate)


MAX_SAMPLES = 100
# Completions whose mean lengths differ by more than this factor cost too differently for one curve.
LENGTH_BAND = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A step: `p` concurrent completions, `throughput` in sampled tokens per second, mean length in tokens."""

    p: int
    throughput: float
    mean_tokens: float


@dataclass(slots=True)
class Window:
    """The last `MAX_SAMPLES` samples, thinned where they are most frequent.

    A settled run keeps measuring one p. When the window is full, it drops the oldest sample of the most frequent p, so
    that it keeps the others, without which no curve can be fitted.
    """

    samples: list[Sample] = field(default_factory=list)

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        if len(self.samples) > MAX_SAMPLES:
            counts = Counter(each.p for each in self.samples)
            # Among equally frequent p drop the current one, because its samples keep coming.
            crowded = max(counts, key=lambda p: (counts[p], p == sample.p))
            self.samples.remove(next(each for each in self.samples if each.p == crowded))

    def comparable(self, mean_tokens: float) -> list[tuple[float, float]]:
        """(p, throughput) of the samples whose completions were about as long, within `LENGTH_BAND`.

        Answers grow during training and long ones cost more per token: old samples would look like contention.
        """
        low, high = mean_tokens / LENGTH_BAND, mean_tokens * LENGTH_BAND
        return [(float(each.p), each.throughput) for each in self.samples if low <= each.mean_tokens <= high]

    def state(self) -> list[list[float]]:
        return [[each.p, each.throughput, each.mean_tokens] for each in self.samples]


OFF = "without [backpressure] enabled"
NO_FIT = "before the first fit"
UNSEEN = "while throughput has not been seen to fall"
METRICS = tuple(
    MetricSpec(name=name, meaning=meaning, unit=unit, absent=absent)
    for name, meaning, unit, absent in (
        ("bp_warmup", "The sweep of batch sizes is under way.", "flag", OFF),
        ("bp_action", "hold, throttle or increase: how the batch size changes.", "text", OFF),
        ("bp_regime", "Limit of the step: warmup, optimal, retrograde, compute_bound or memory_bound.", "text", OFF),
        ("bp_throughput", "Moving average of generated tokens per second.", "tokens/s", f"{OFF}, before a measurement"),
        ("bp_sigma", "Contention of the fitted universal scalability law.", "", NO_FIT),
        ("bp_kappa", "Coherency cost of that law.", "", NO_FIT),
        ("bp_p_star", "Concurrent completions of highest throughput.", "completions", f"{NO_FIT}; {UNSEEN}"),
        ("bp_utilization", "Completions of the step over `bp_p_star`.", "", f"{NO_FIT}; {UNSEEN}"),
        ("bp_ceiling", "Largest batch size since memory ran out.", "prompts", "unless memory ran out"),
    )
)
