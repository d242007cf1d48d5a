"""The chance that a group teaches: a distribution of each prompt's rate, drifting with the policy; and calibration.

A group of G completions teaches when it is neither all right nor all wrong: at a rate p, 1 - p^G - (1-p)^G.
Shapes: N prompts, K rates of a fixed grid, F forecasts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from retrain.kernel.types import Floats

# Log-odds from -7 to 7, half a unit apart: the outermost rates are 0.0009 and 0.9991.
_SPAN, _CELLS = 7.0, 29
# Expectation maximisation: further rounds change no forecast by more than about 0.002.
_ROUNDS = 40
# Prior standard deviations of the drift per step, and of its change within a step.
_DRIFT_SD, _DRIFT_STEP_SD = 0.1, 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class TeachingForecast:
    """The settings by which a `RateBook` turns outcomes into rates; ValueError for values out of range.

    A completion's evidence is multiplied by `decay` in (0, 1] with each step, because the policy changes. Rates of
    prompts have a common distribution, fitted to all of them: `prior` = (alpha, beta), both positive, is its
    guess without evidence, and counts as much as `prior_weight` prompts.
    """

    decay: float = 0.98
    prior: tuple[float, float] = (0.3, 0.3)
    prior_weight: float = 2.0

    def __post_init__(self) -> None:
        positive = (*self.prior, self.prior_weight)
        if not (0.0 < self.decay <= 1.0 and all(0.0 < each < math.inf for each in positive)):
            raise ValueError(f"{self}")


class _Evidence(NamedTuple):
    """Right and wrong completions of a prompt as of step `at`, each times decay^(steps since), and their mean step."""

    right: float = 0.0
    wrong: float = 0.0
    mean: float = 0.0
    at: int = 0


@dataclass(slots=True, kw_only=True)
class RateBook:
    """Each prompt's rate of correct completions at a step, estimated from the steps before it.

    Rates lie on a grid. A prompt's posterior is proportional to population(p) q^right (1-q)^wrong, where q is the rate
    that one of p had when the evidence was drawn: log-odds of all prompts move by a common drift per step, but for the
    outermost rates, never and always. An extended Kalman filter follows the drift. The population's
    distribution is the non-parametric estimate from all prompts' present evidence (Laird 1978, by expectation
    maximisation) and can hold prompts that are never or always right. It is the posterior of an unseen prompt, and
    of one whose evidence has decayed.
    """

    settings: TeachingForecast = field(default_factory=TeachingForecast)
    drift: float = 0.0  # of log-odds per step
    _variance: float = _DRIFT_SD**2
    _seen: dict[str, _Evidence] = field(default_factory=dict)
    _pending: list[tuple[str, int, int]] = field(default_factory=list)  # groups of step `_step`: id, correct, judged
    _step: int = 0
    _fitted: tuple[int, Floats] | None = None

    def observe(self, example_id: str, step: int, correct: int, judged: int) -> None:
        """Count a group of `step`: `correct` of its `judged` completions; nothing when none was judged.

        ValueError unless 0 <= correct <= judged, or when groups of a later step were counted before.
        """
        if not 0 <= correct <= judged:
            raise ValueError(f"{correct} of {judged} completions")
        self._take_in(step)
        self._step = step
        if judged:
            self._pending.append((example_id, correct, judged))

    def chances(self, example_ids: Sequence[str], step: int, group_size: int) -> Floats:
        """Return the chance in [0, 1] that a group teaches at `step`, of each prompt: [N]."""
        return np.asarray(self._posterior(example_ids, step) @ teaching(_RATES_K, group_size))

    def rate(self, example_id: str, step: int) -> tuple[float, float]:
        """Return the Beta distribution (alpha, beta) with the mean and variance of the prompt's posterior at `step`."""
        posterior_K = self._posterior([example_id], step)[0]
        mean = float(posterior_K @ _RATES_K)
        variance = float(posterior_K @ (_RATES_K - mean) ** 2)
        total = mean * (1.0 - mean) / max(variance, 1e-12) - 1.0
        return mean * total, (1.0 - mean) * total

    def draw(self, example_ids: Sequence[str], step: int, rng: np.random.Generator) -> Floats:
        """Draw one rate of each prompt from its posterior at `step`: [N]."""
        at_most_NK = np.cumsum(self._posterior(example_ids, step), axis=1)
        cells_N = (at_most_NK < rng.random(len(example_ids))[:, None]).sum(axis=1)
        return np.asarray(_RATES_K[np.minimum(cells_N, _CELLS - 1)])

    def population(self, step: int) -> Floats:
        """Return weights of the grid's rates among prompts at `step`, with a sum of 1: [K]."""
        self._take_in(step)
        if self._fitted is None or self._fitted[0] != step:
            # Sorted, so that sums are the same to the bit after a restore, whatever the order of the state.
            in_order = sorted(self._seen)
            likelihood_NK = self._likelihood(in_order, step)
            alpha, beta = self.settings.prior
            # The density times p (1 - p), because the cells are equally wide in log-odds, not in rates.
            guess_K: Floats = _RATES_K**alpha * (1.0 - _RATES_K) ** beta
            guess_K *= self.settings.prior_weight / guess_K.sum()
            weights_K: Floats = guess_K / guess_K.sum()
            for _ in range(_ROUNDS if len(likelihood_NK) else 0):
                share_N = 1.0 / (likelihood_NK @ weights_K)
                weights_K = guess_K + weights_K * (share_N @ likelihood_NK)
                weights_K /= weights_K.sum()
            self._fitted = (step, weights_K)
        return self._fitted[1]

    def state(self) -> dict[str, Any]:
        """Return everything as JSON; `restore` continues from it exactly."""
        return {
            "seen": {each: list(evidence) for each, evidence in self._seen.items()},
            "pending": [list(group) for group in self._pending],
            "step": self._step,
            "drift": [self.drift, self._variance],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._seen = {each: _Evidence(*evidence) for each, evidence in state["seen"].items()}
        self._pending = [(example_id, correct, judged) for example_id, correct, judged in state["pending"]]
        self._step = state["step"]
        self.drift, self._variance = state["drift"]
        self._fitted = None

    def _take_in(self, step: int) -> None:
        """Turn pending groups of an earlier step into evidence; ValueError when they are of a later one."""
        if step < self._step:
            raise ValueError(f"step {step}, but groups of step {self._step} were counted")
        if step > self._step and self._pending:
            groups = self._pending
            if self._seen:
                self._follow(self._step, groups)
            for example_id, correct, judged in groups:
                self._add(example_id, self._step, correct, judged - correct)
            self._pending, self._fitted = [], None

    def _add(self, example_id: str, step: int, right: float, wrong: float) -> None:
        old = self._seen.get(example_id, _Evidence(at=step))
        kept = self.settings.decay ** (step - old.at)
        before, now = kept * (old.right + old.wrong), right + wrong
        mean = (before * old.mean + now * step) / (before + now)
        self._seen[example_id] = _Evidence(kept * old.right + right, kept * old.wrong + wrong, mean, step)

    def _follow(self, step: int, groups: Sequence[tuple[str, int, int]]) -> None:
        """Move the drift towards the outcomes of the groups of `step`: one update of the filter for each."""
        known = [group for group in groups if group[0] in self._seen]
        posterior_NK = self._posterior([example_id for example_id, _, _ in known], step)
        means_N = posterior_NK @ _RATES_K
        slopes_N = posterior_NK @ (_RATES_K * (1.0 - _RATES_K))
        spreads_N = posterior_NK @ _RATES_K**2 - means_N**2
        # The drift itself changes: without this the filter would soon ignore new outcomes.
        self._variance += _DRIFT_STEP_SD**2
        for (example_id, correct, judged), mean, slope, spread in zip(known, means_N, slopes_N, spreads_N, strict=True):
            slope = judged * float(slope) * (step - self._seen[example_id].mean)
            # The variance of a binomial count whose rate is itself uncertain, with the variance `spread`.
            noise = judged * float(mean * (1.0 - mean)) + judged * (judged - 1) * float(spread)
            gain = self._variance * slope / (self._variance * slope**2 + noise)
            self.drift += gain * (correct - judged * float(mean))
            self._variance *= 1.0 - gain * slope

    def _likelihood(self, example_ids: Sequence[str], step: int) -> Floats:
        """Return the likelihood up to a factor per prompt: [N, K]."""
        found = [self._seen[each] for each in example_ids]
        right_N, wrong_N, mean_N, at_N = np.array(found).reshape(-1, 4).T
        kept_N = self.settings.decay ** (step - at_N)
        odds_NK = _ODDS_K - self.drift * (step - mean_N)[:, None]
        # Prompts that are never or always right stay so, however the policy drifts.
        odds_NK[:, [0, -1]] = _ODDS_K[[0, -1]]
        log_NK = (kept_N * right_N)[:, None] * odds_NK
        log_NK -= (kept_N * (right_N + wrong_N))[:, None] * np.logaddexp(0.0, odds_NK)
        return np.asarray(np.exp(log_NK - log_NK.max(axis=1, keepdims=True, initial=-np.inf)))

    def _posterior(self, example_ids: Sequence[str], step: int) -> Floats:
        """Return the posterior of each prompt over the grid: [N, K]."""
        weights_K = self.population(step)
        posterior_NK = np.tile(weights_K, (len(example_ids), 1))
        known = [index for index, each in enumerate(example_ids) if each in self._seen]
        if known:
            posterior_NK[known] *= self._likelihood([example_ids[index] for index in known], step)
            posterior_NK[known] /= posterior_NK[known].sum(axis=1, keepdims=True)
        return posterior_NK


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Forecast chances and outcomes in bins of equal counts, lowest forecasts first.

    `bins` has (mean forecast, share that happened, count) of each; `error` is their mean absolute difference, weighted
    by count: the expected calibration error, in [0, 1]. Chance makes it positive: about sqrt(2 p (1-p) / (pi n)) in a
    bin of n.
    """

    bins: tuple[tuple[float, float, int], ...]
    error: float


def calibration(forecasts_F: Sequence[float], outcomes_F: Sequence[bool], *, bins: int = 10) -> Calibration | None:
    """Return the calibration in `bins` bins of equal counts (fewer with fewer forecasts); None without forecasts.

    Equal forecasts may fall into two bins, in the order given. ValueError when a forecast is not in [0, 1] or the
    lengths differ.
    """
    forecasts, outcomes = np.asarray(forecasts_F, dtype=np.float64), np.asarray(outcomes_F, dtype=np.float64)
    if forecasts.shape != outcomes.shape or not ((forecasts >= 0.0) & (forecasts <= 1.0)).all():
        raise ValueError("a forecast in [0, 1] is wanted for each outcome")
    if not forecasts.size:
        return None
    parts = [part for part in np.array_split(np.argsort(forecasts, kind="stable"), bins) if part.size]
    found = tuple((float(forecasts[part].mean()), float(outcomes[part].mean()), len(part)) for part in parts)
    error = sum(count * abs(forecast - share) for forecast, share, count in found) / len(forecasts)
    return Calibration(bins=found, error=error)


def teaching(rates_K: Floats, group_size: int) -> Floats:
    """Return 1 - p^G - (1-p)^G of each rate p, in [0, 1]."""
    return np.maximum(0.0, 1.0 - rates_K**group_size - (1.0 - rates_K) ** group_size)


_ODDS_K: Floats = np.linspace(-_SPAN, _SPAN, _CELLS)
_RATES_K: Floats = 1.0 / (1.0 + np.exp(-_ODDS_K))
