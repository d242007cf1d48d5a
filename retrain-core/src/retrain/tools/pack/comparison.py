"""Compares a rerun with its pack: step by step, by the declared test of equivalence, and by a campaign's verdict.

A step's line has every field of `metrics.jsonl` but the times, the checksum of its token file (ids, log-probabilities
and credit of every action token), and the checksum of its evaluations in `eval.jsonl`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from retrain.kernel.config.toml_file import open_regular
from retrain.kernel.errors import ConfigError
from retrain.records.files import digest_of, new_digest
from retrain.records.reading import TIMED, Record, damaged, number, parse_record
from retrain.records.record_names import EVALUATION, METRICS, token_file
from retrain.text.amounts import counted
from retrain.verdicts.stats.paired import t_interval
from retrain.verdicts.study.comparison_with_ledger import comparison_with_ledger
from retrain.verdicts.study.study import Options

TOKENS, EVALUATED = "(tokens)", "(evaluation)"  # fields that are checksums; no metric has such a name
MOST_FIELDS = 5
SHOWN_FIRST = ("loss", "correct_rate", "mean_reward", "eval_correct_rate")
ALPHA = 0.05
HELD_OUT_SET = "held_out"


@dataclass(slots=True)
class RunLines:
    """Reads the lines of a run folder as they come; each call of `new` continues where the last one ended."""

    run: Path
    _places: dict[str, int] = field(default_factory=dict)
    _evaluations: dict[int, Any] = field(default_factory=dict)

    def new(self) -> Iterator[Record]:
        """Yield the lines that are complete by now and were not given yet; ConfigError for a damaged one."""
        for record in self._complete(METRICS):
            line = {name: value for name, value in record.items() if not name.endswith(TIMED)}
            step = record.get("step")
            if type(step) is not int:
                raise damaged(str(self.run / METRICS), "a line has no step")
            for evaluated in self._complete(EVALUATION):
                digest = self._evaluations.setdefault(evaluated.get("step", 0), new_digest())
                digest.update(json.dumps(evaluated, sort_keys=True).encode())
            if step in self._evaluations:
                line[EVALUATED] = self._evaluations.pop(step).hexdigest()
            with suppress(OSError):
                line[TOKENS] = digest_of(token_file(self.run, step)).hexdigest()
            yield line

    def _complete(self, name: str) -> Iterator[Record]:
        try:
            with open_regular(self.run / name) as stream:
                stream.seek(self._places.get(name, 0))
                for text in stream:
                    if not text.endswith(b"\n"):
                        return
                    self._places[name] = self._places.get(name, 0) + len(text)
                    yield parse_record(text)
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            raise damaged(str(self.run / name), str(error)) from error


def encoded(line: Record) -> bytes:
    return (json.dumps(line, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first line in which a rerun differs from the run: its step, and both values of every differing field.

    A value is None where a side does not have the field. `missing` says that a side has no line of the step at all.
    """

    run: str
    step: int
    fields: Mapping[str, tuple[Any, Any]]
    missing: str = ""

    @property
    def is_rounding(self) -> bool:
        """True if only numbers differ, each by less than 0.1 %: the effect of other kernels on the same run."""
        pairs = [pair for name, pair in self.fields.items() if name not in (TOKENS, EVALUATED)]
        numbers = [(number(old), number(new)) for old, new in pairs]
        # 0.1 % is far above the difference of two kernels in one step, and far below the effect of another seed.
        return bool(pairs) and all(
            old is not None and new is not None and math.isclose(old, new, rel_tol=1e-3, abs_tol=1e-9)
            for old, new in numbers
        )

    def as_data(self) -> dict[str, Any]:
        fields = {name: {"pack": pair[0], "rerun": pair[1]} for name, pair in self.fields.items()}
        return {"run": self.run, "step": self.step, "fields": fields, "missing": self.missing}

    def lines(self) -> list[str]:
        where = "the evaluation before training" if self.step < 0 else f"step {self.step}"
        head = f"first divergence: {where}" + (f" of {self.run}" if self.run else "")
        if self.missing:
            return [f"{head}: {self.missing}"]
        shown = sorted(self.fields.items(), key=lambda item: item[0] not in SHOWN_FIRST)
        rows = [f"  {name}: {json.dumps(old)} in the pack, {json.dumps(new)} here" for name, (old, new) in shown]
        more = [f"  and {len(rows) - MOST_FIELDS} more fields"] if len(rows) > MOST_FIELDS else []
        return [f"{head}, {counted(len(rows), 'field')}", *rows[:MOST_FIELDS], *more]


def divergence(run: str, packed: Record | None, here: Record | None) -> Divergence | None:
    """Return the difference of two lines of a run; None when they are the same. A line of None: that side has ended."""
    if packed is None or here is None:
        line = packed or here
        side = "the rerun has no such line" if here is None else "the pack has no such line"
        return Divergence(run=run, step=line["step"], fields={}, missing=side) if line else None
    if packed == here:
        return None
    names = [*packed, *(name for name in here if name not in packed)]
    differing = {name: (packed.get(name), here.get(name)) for name in names if packed.get(name) != here.get(name)}
    step = packed["step"] if type(packed.get("step")) is int else here["step"]
    return Divergence(run=run, step=step, fields=differing)


def verdict_of(campaign: Path) -> dict[str, Any]:
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


# The test of equivalence of a rerun that is not identical: two one-sided tests (D. J. Schuirmann, J. Pharmacokinetics
# and Biopharmaceutics 15:657, 1987) on the final held-out rates. The mean over examples of rerun minus pack, with
# Student's interval over clusters of examples at 1 - alpha, must be strictly inside (-margin, margin). So each side is
# tested at alpha / 2, as in campaigns. The test is about these two runs and such examples, not about other seeds.


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
