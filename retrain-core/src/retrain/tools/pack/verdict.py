"""The verdict of a campaign, for the pack and from its rerun, and the test of equivalence; no look is recorded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrain.kernel.errors import ConfigError
from retrain.records.reading import Record
from retrain.verdicts.stats.paired import t_interval
from retrain.verdicts.study.comparison_with_ledger import comparison_with_ledger
from retrain.verdicts.study.study import Options


def verdict_of(campaign: Path) -> dict[str, Any]:
    """Return the metric, the standing, and each comparison; `problem` says why nothing could be compared."""
    try:
        study = comparison_with_ledger([campaign], Options(), is_recorded=False)
    except ConfigError as error:
        return {"problem": error.problems[0].what}
    comparisons = [
        {
            "condition": each.condition,
            "baseline": each.baseline,
            "verdict": str(each.verdict),
            "cause": str(each.cause),
            "difference": each.difference,
            "interval": [limit if math.isfinite(limit) else None for limit in each.interval] if each.interval else None,
            "seeds": list(each.seeds),
        }
        for each in study.comparisons
    ]
    return {"metric": str(study.metric), "standing": study.standing, "comparisons": comparisons}


def verdict_lines(verdict: dict[str, Any]) -> list[str]:
    if problem := verdict.get("problem"):
        return [f"no verdict: {problem}"]
    return [
        f"{each['condition']} against {each['baseline']}: {each['verdict']} ({each['cause']}), "
        f"{verdict['metric']} {each['difference'] if each['difference'] is not None else 'unknown'}"
        for each in verdict.get("comparisons", ())
    ]


# Whether a rerun that is not identical is equivalent, by the test that its pack declared.
#
# Two one-sided tests (D. J. Schuirmann, J. Pharmacokinetics and Biopharmaceutics 15:657, 1987) on the final held-out
# rates: the mean over examples of rerun minus pack, with Student's interval over clusters of examples at 1 - alpha,
# strictly inside (-margin, margin). So each side is tested at alpha / 2, as in campaigns. It is about these two runs
# and such examples, not about other seeds.


ALPHA = 0.05
HELD_OUT_SET = "held_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence:
    """Outcome of the test: `difference` is rerun minus pack. Without both final evaluations `reason` says why."""

    margin: float
    alpha: float = ALPHA
    difference: float | None = None
    interval: tuple[float, float] | None = None
    num_examples: int = 0
    reason: str = ""

    @property
    def is_equivalent(self) -> bool:
        """True if the interval lies strictly inside the margin."""
        return self.interval is not None and -self.margin < self.interval[0] and self.interval[1] < self.margin

    def as_data(self) -> dict[str, Any]:
        return {**asdict(self), "equivalent": self.is_equivalent}

    def __str__(self) -> str:
        if self.interval is None or self.difference is None:
            return f"equivalence could not be tested: {self.reason}"
        low, high = self.interval
        shown = f"held-out {100 * self.difference:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]"
        verdict = "equivalent" if self.is_equivalent else "not shown to be equivalent"
        return f"{verdict}: {shown} on {self.num_examples} examples, margin {100 * self.margin:g} points"


def final_rates(records: Iterable[Record]) -> dict[str, tuple[str, float]]:
    """Return cluster and correct rate of each held-out example at the last evaluation of an `eval.jsonl`."""
    rates: dict[str, tuple[str, float]] = {}
    last: object = None
    for record in records:
        correct = record.get("correct")
        if record.get("set") != HELD_OUT_SET or not isinstance(correct, list) or not correct:
            continue
        if record.get("step") != last:
            last, rates = record.get("step"), {}
        rates[str(record.get("example"))] = str(record.get("cluster")), sum(map(bool, correct)) / len(correct)
    return rates


def equivalence(packed: Mapping[str, Any], here: Mapping[str, Any], margin: float) -> Equivalence:
    """Test `final_rates` of the rerun against the pack's, paired by example."""
    if not packed or packed.keys() != here.keys():
        both = len(packed.keys() & here.keys())
        reason = f"{len(packed)} held-out examples in the pack and {len(here)} here, {both} of them the same"
        return Equivalence(margin=margin, reason=reason)
    by_cluster: dict[str, list[float]] = {}
    for name, (cluster, rate) in packed.items():
        by_cluster.setdefault(cluster, []).append(here[name][1] - rate)
    diffs_C = np.array([math.fsum(diffs) / len(diffs) for diffs in by_cluster.values()])
    interval = t_interval(diffs_C, level=1.0 - ALPHA)
    if interval is None:
        return Equivalence(margin=margin, reason="one held-out example, or one cluster of them, has no spread")
    return Equivalence(margin=margin, difference=float(diffs_C.mean()), interval=interval, num_examples=len(packed))


def expected_half_width(rates: Mapping[str, tuple[str, float]], samples: int) -> float:
    """Return the interval's expected half width when only sampling differs: two binomial means."""
    if not rates or not samples:
        return math.inf
    variance = math.fsum(rate * (1.0 - rate) / samples for _, rate in rates.values()) / len(rates)
    return 1.96 * math.sqrt(2.0 * variance / len(rates))


def parsed(text: bytes) -> Iterable[Record]:
    return (json.loads(line) for line in text.splitlines() if line.strip())
