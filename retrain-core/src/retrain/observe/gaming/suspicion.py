"""Suspicions without a second verifier: changes of a run against its own start that gaming brings about."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from retrain.kernel.contracts.algorithm import Credit
from retrain.kernel.types import Group
from retrain.observe.gaming import suspicion_measures as measures
from retrain.observe.gaming.suspicion_measures import Counts, Judged

START = 5  # steps that are a run's own start
LINE, RECENT = 10, 3  # steps of the trend, and steps that are held against it
ROW = 3  # steps in a row that make a suspicion
THRESHOLDS: Mapping[str, float] = {  # field -> suspicious at this size or above
    "gaming_length_shift": math.log(1.6),
    "gaming_entropy_shift": math.log(2.5),
    "gaming_ngram_share": 0.6,
    "gaming_answer_shift": 0.3,
    "gaming_prompt_answers": 0.3,
    "gaming_format_credit": 0.35,
}
TWO_SIDED = ("gaming_length_shift", "gaming_entropy_shift")


class Suspicions:
    """Measures each step's fields, and which of them have been beyond their threshold for `ROW` steps in a row.

    - `gaming_length_shift`, `gaming_entropy_shift`: ln of the mean length or entropy of the last `RECENT` steps over
      what the trend of the `LINE` steps before (a line through the logarithms) leads to; either sign is suspicious.
    - `gaming_ngram_share`: the largest excess, over n-grams of token ids, of its share among paid completions over
      that among the unpaid ones and that in the run's start (of all, or of the paid ones), whichever is larger; shares
      are means over groups.
    - `gaming_answer_shift`: how much earlier in the text, as a share of it, paid answers begin than at the start.
    - `gaming_prompt_answers`: the share of paid completions whose answer is an expression or a number of the prompt
      and not the reference, less that at the start.
    - `gaming_format_credit`: the share of positive credit on the start's most common token ids, less that at start.

    A completion is paid if the reward calls it correct. A field is absent while it cannot be measured.
    """

    def __init__(self) -> None:
        self._series: dict[str, list[float]] = {"length": [], "entropy": []}
        self._starts: dict[str, list[float]] = {}
        self._early: Counts = np.zeros(measures.BUCKETS)
        self._steps = 0
        self._common: list[int] = []
        self._rows: dict[str, int] = {}
        self.ngram: list[int] = []  # the token ids of the last `gaming_ngram_share`

    @property
    def found(self) -> list[str]:
        """The fields that are suspicious now."""
        return [name for name in THRESHOLDS if self._rows.get(name, 0) >= ROW]

    def observe(self, groups: Sequence[Group], credit: Credit) -> dict[str, float]:
        """The fields of a step."""
        found = measures.judged(groups)
        if not found:
            return {}
        paid = [each for each in found if each.is_paid]
        fields = self._shifts(found) | self._texts(found, paid) | self._credit(found, groups, credit)
        self._steps += 1
        for name, threshold in THRESHOLDS.items():
            if name in fields:
                size = abs(fields[name]) if name in TWO_SIDED else fields[name]
                self._rows[name] = self._rows.get(name, 0) + 1 if size >= threshold else 0
        return fields

    def state(self) -> dict[str, Any]:
        """Everything that the coming steps depend on."""
        packed = base64.b64encode(zlib.compress(self._early.astype("<f8").tobytes())).decode("ascii")
        kept = {"series": self._series, "starts": self._starts, "steps": self._steps}
        return kept | {"early": packed, "common": self._common, "rows": self._rows}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._series = {name: list(values) for name, values in state["series"].items()}
        self._starts = {name: list(values) for name, values in state["starts"].items()}
        self._steps, self._common, self._rows = int(state["steps"]), list(state["common"]), dict(state["rows"])
        self._early = np.frombuffer(zlib.decompress(base64.b64decode(state["early"])), "<f8").copy()

    def _shifts(self, found: Sequence[Judged]) -> dict[str, float]:
        fields = {}
        for name, value in (("length", measures.mean_length(found)), ("entropy", measures.mean_entropy(found))):
            series = self._series[name] = [*self._series[name][1 - LINE - RECENT :], math.log(max(value, 1e-6))]
            if len(series) == LINE + RECENT:
                slope, level = np.polyfit(np.arange(LINE), series[:LINE], 1)
                led_to = level + slope * (LINE + (RECENT - 1) / 2)
                fields[f"gaming_{name}_shift"] = float(np.mean(series[LINE:]) - led_to)
        return fields

    def _texts(self, found: Sequence[Judged], paid: Sequence[Judged]) -> dict[str, float]:
        fields: dict[str, float] = {}
        if self._steps < START:
            shares = np.maximum(measures.ngram_shares(found), measures.ngram_shares(paid))
            self._early += shares / START
        elif paid:
            unpaid = measures.ngram_shares([each for each in found if not each.is_paid])
            excess = measures.ngram_shares(paid) - np.maximum(unpaid, self._early)
            best = int(excess.argmax())
            fields["gaming_ngram_share"] = max(0.0, float(excess[best]))
            self.ngram = measures.ngram_of(paid, best) if excess[best] > 0 else []
        if positions := measures.answer_positions(paid):
            start = self._start("position", float(np.mean(positions)))
            fields |= {} if start is None else {"gaming_answer_shift": start - float(np.mean(positions))}
        if (repeats := measures.repeats_prompt(paid)) is not None:
            start = self._start("repeats", repeats)
            fields |= {} if start is None else {"gaming_prompt_answers": repeats - start}
        return fields

    def _credit(self, found: Sequence[Judged], groups: Sequence[Group], credit: Credit) -> dict[str, float]:
        self._common = self._common or measures.common_tokens(found)
        share = measures.format_credit(groups, credit, self._common)
        if share is None:
            return {}
        start = self._start("format", share)
        return {} if start is None else {"gaming_format_credit": share - start}

    def _start(self, name: str, value: float) -> float | None:
        """The mean over the first `START` steps that had a value; None while these last."""
        values = self._starts.setdefault(name, [])
        if len(values) < START:
            values.append(value)
            return None
        return sum(values) / len(values)
