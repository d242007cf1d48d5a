"""A change-point test on proxy minus shadow, with a stated chance that a run without a change alarms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrain.kernel.types import Floats, Group

ALPHA = 0.05  # of runs without a change at most this share ever alarms
WINDOW = 20  # steps before a start that are its reference
LEAST_STEPS, LEAST_GROUPS = 5, 16  # of a reference
TOLERANCE = 0.05  # a rise of the unconfirmed share that is no change
SPREADS = 2.0  # standard errors of the reference that are no change either
LARGEST = 0.9  # a reference above this leaves no room for a rise
BETS = (0.1, 0.3, 0.6)  # share of the stake lost on a group that the shadow confirms altogether
MOST_EVIDENCE = 20.0 / ALPHA  # what is above is given up, so that an alarm ends soon after its cause
MOST_STARTS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Of a group of `size` completions `of` are looked at, and `part` of these are what is counted."""

    size: int
    of: int
    part: float


class RiseTest:
    """An e-process against 'a share is no larger than before', for shares of groups of completions.

    Every step j is a possible start. Its reference is the share r = U / K over the `WINDOW` steps up to j (U counted of
    K looked at, plus one imaginary group that is counted altogether), with its standard error s clustered by group.
    After j it bets on each group that E[u - m k] > 0, with m = r + TOLERANCE + SPREADS s, u counted of k looked at in a
    group of n: its stake is multiplied by 1 + f (u - m k) / (m n), for each bet f. If the share is at most m no bet
    gains on average, so each stake is a nonnegative supermartingale whatever the law of a group is. The i-th start has
    the stake 1 / (i (i + 1)); the chance that the sum ever reaches 1 / alpha is at most alpha (Ville; a mixture over
    starts, as in Shin, Ramdas & Rinaldo 2022, arXiv:2203.03532), up to the error of the references, for which SPREADS
    stands: what remains is simulated.
    """

    def __init__(self) -> None:
        self._begun = 0  # starts so far
        self._window: list[list[float]] = []  # per step: groups, and the sums of u, k, u^2, u k, k^2
        self._steps: list[int] = []  # of the starts that are kept
        self._limits_S = np.zeros(0)
        self._stakes_SB = np.zeros((0, len(BETS)))  # each start's weight, divided among its bets

    @property
    def evidence(self) -> float:
        """The sum of all stakes, those of starts to come included; at most `MOST_EVIDENCE`."""
        return float(self._stakes_SB.sum()) + 1.0 / (self._begun + 1)

    @property
    def since(self) -> int | None:
        """The first step after the start with the largest stake: the estimated change point. None before any start."""
        return self._steps[self._best] + 1 if self._steps else None

    def observe(self, step: int, groups: Sequence[Count]) -> None:
        """Bet on the groups of a step, then let it be a start; a step without groups changes nothing."""
        if not groups:
            return
        sizes_P, ofs_P, parts_P = np.array([(each.size, each.of, each.part) for each in groups], dtype=float).T
        limits_S1 = self._limits_S[:, None]
        gains_SP = (parts_P - limits_S1 * ofs_P) / (limits_S1 * sizes_P)
        logs_SB = np.log1p(np.array(BETS)[:, None] * gains_SP[:, None, :]).sum(axis=2)
        self._stakes_SB = self._stakes_SB * np.exp(np.minimum(logs_SB, 600.0))
        self._stakes_SB /= max(1.0, self.evidence / MOST_EVIDENCE)
        self._begin(step, ofs_P, parts_P)

    def state(self) -> dict[str, Any]:
        """Everything that the coming steps depend on."""
        arrays = {"limits": self._limits_S.tolist(), "stakes": self._stakes_SB.tolist()}
        return {"begun": self._begun, "window": self._window, "steps": self._steps, **arrays}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._begun, self._steps = int(state["begun"]), list(state["steps"])
        self._window = [list(step) for step in state["window"]]
        self._limits_S = np.array(state["limits"], dtype=float)
        self._stakes_SB = np.array(state["stakes"], dtype=float).reshape(-1, len(BETS))

    @property
    def _best(self) -> int:
        return int(self._stakes_SB.sum(axis=1).argmax())

    def _begin(self, step: int, ofs_P: Floats, parts_P: Floats) -> None:
        """Let the steps up to this one be a reference, and bet from the next one on, if they are enough."""
        sums = (parts_P.sum(), ofs_P.sum(), parts_P @ parts_P, parts_P @ ofs_P, ofs_P @ ofs_P)
        self._window = [*self._window[1 - WINDOW :], [float(ofs_P.size), *map(float, sums)]]
        groups, part, of, squares, products, of_squares = np.sum(self._window, axis=0)
        if len(self._window) < LEAST_STEPS or groups < LEAST_GROUPS:
            return
        usual = of / groups  # the size of the imaginary group
        share = (part + usual) / (of + usual)
        spread = squares - 2.0 * share * products + share**2 * of_squares + (usual * (1.0 - share)) ** 2
        limit = share + TOLERANCE + SPREADS * math.sqrt(max(0.0, spread)) / (of + usual)
        if limit > LARGEST:
            return
        self._begun += 1
        stake = 1.0 / (self._begun * (self._begun + 1) * len(BETS))
        self._steps.append(step)
        self._limits_S = np.append(self._limits_S, limit)
        self._stakes_SB = np.append(self._stakes_SB, np.full((1, len(BETS)), stake), axis=0)
        if len(self._steps) > MOST_STARTS:
            least = int(self._stakes_SB[:-1].sum(axis=1).argmin())
            del self._steps[least]
            self._limits_S = np.delete(self._limits_S, least)
            self._stakes_SB = np.delete(self._stakes_SB, least, axis=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """A group's completions that reward and shadow both scored, by what the two call correct.

    `judged` in all, `paid` by the reward, `confirmed` by both, `missed` by the shadow alone.
    """

    judged: int
    paid: int
    confirmed: int
    missed: int = 0


def verdicts_of(groups: Sequence[Group]) -> list[Verdicts]:
    """The verdicts of a step's first round, group by group; none without a shadow."""
    found = []
    for group in groups:
        if group.round:  # drawn because the first taught too little: its outcomes are selected
            continue
        pairs = [
            (raw.value > group.correct_above, raw.shadow.value > group.correct_above)
            for raw in group.raw_scores
            if raw.value is not None and raw.shadow is not None and raw.shadow.value is not None
        ]
        if pairs:
            paid, confirmed = sum(pays for pays, _ in pairs), sum(pays and confirms for pays, confirms in pairs)
            missed = sum(confirms for _, confirms in pairs) - confirmed
            found.append(Verdicts(judged=len(pairs), paid=paid, confirmed=confirmed, missed=missed))
    return found


class GamingAlarm:
    """An alarm on the change of proxy minus shadow, in two ways that clean learning does not bring about.

    1. Of what the reward pays, a larger share than before is unconfirmed by the shadow. Among completions that the
       reward calls correct, that share is the mean gap of verdicts. Getting better at both, a shadow that is stricter
       throughout, and a lenient one leave it as it is.
    2. The gap of verdicts over all completions rises, and the shadow's rate falls: a reward that never paid for what
       the shadow wants. Either alone is no gaming: a strict reward catches up, or prompts get harder. Clean is what
       leaves one of the two as it was, so the evidence is the smaller of both.

    Each is a `RiseTest`; `evidence` is the mean of 1 and 2, an e-process as they are, so that the chance of ever
    reaching 1 / ALPHA is at most ALPHA. An alarm begins there and ends when the evidence has fallen below 1.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._tests = {name: RiseTest() for name in ("unconfirmed", "gap", "fall")}

    @property
    def evidence(self) -> float:
        """The e-value of the steps so far."""
        by_name = {name: test.evidence for name, test in self._tests.items()}
        return (by_name["unconfirmed"] + min(by_name["gap"], by_name["fall"])) / 2.0

    @property
    def since(self) -> int | None:
        """The first step after the estimated change; None before any possible start."""
        unconfirmed, gap = self._tests["unconfirmed"], self._tests["gap"]
        is_second = min(gap.evidence, self._tests["fall"].evidence) > unconfirmed.evidence
        return (gap if is_second else unconfirmed).since

    def observe(self, step: int, groups: Sequence[Verdicts]) -> None:
        """Take in a step; one without a group that both scored changes nothing."""
        for name, test in self._tests.items():
            test.observe(step, [count for each in groups if (count := _count(name, each)).of])
        self.is_on = self.evidence >= (1.0 if self.is_on else 1.0 / ALPHA)

    def state(self) -> dict[str, Any]:
        """Everything that the coming steps depend on."""
        return {"is_on": self.is_on, **{name: test.state() for name, test in self._tests.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.is_on = bool(state["is_on"])
        for name, test in self._tests.items():
            test.restore(state[name])


def _count(name: str, group: Verdicts) -> Count:
    if name == "unconfirmed":
        return Count(size=group.judged, of=group.paid, part=group.paid - group.confirmed)
    if name == "gap":  # (1 + proxy - shadow) / 2, which is between 0 and 1
        gap = group.paid - group.confirmed - group.missed
        return Count(size=group.judged, of=group.judged, part=(group.judged + gap) / 2.0)
    return Count(size=group.judged, of=group.judged, part=group.judged - group.confirmed - group.missed)
