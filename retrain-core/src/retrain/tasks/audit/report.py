"""The report of an audit: the tried texts by check, the findings, and their causes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from retrain.kernel.contracts.tasks import TimedScore
from retrain.kernel.types import Outcome
from retrain.tasks.audit.probes import Probe, Severity
from retrain.text.amounts import counted, duration


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFinding:
    """A fault of the reward: `text` is the beginning of the scored text, `check` its kind.

    `cause` is the message without the details of this text: findings of one cause are reported once.
    """

    severity: Severity
    check: str
    example_id: str
    text: str
    message: str
    fix: str
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    findings: tuple[AuditFinding, ...]

    @property
    def first(self) -> AuditFinding:
        return self.findings[0]

    @property
    def examples(self) -> int:
        return len({finding.example_id for finding in self.findings})

    def as_data(self) -> dict[str, Any]:
        first, counts = self.first, {"examples": self.examples, "findings": len(self.findings)}
        return {"severity": first.severity, "check": first.check, "cause": first.cause, "fix": first.fix, **counts}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    probe: Probe
    first: TimedScore
    second: TimedScore
    correct_above: float

    @property
    def values(self) -> list[float]:
        return [t.score.value for t in (self.first, self.second) if t.score.value is not None]

    @property
    def is_correct(self) -> bool:
        return any(value > self.correct_above for value in self.values)

    @property
    def seconds(self) -> float:
        # The faster try: the first may include imports and caches that a run pays for once.
        return min(self.first.seconds, self.second.seconds)

    @property
    def is_sound(self) -> bool:
        """True if no finding is possible: scored twice alike, and a wrong text neither correct nor above 0."""
        one, other = self.first.score, self.second.score
        is_stable = (one.outcome, one.value) == (other.outcome, other.value) and not self.has(Outcome.FAILED)
        is_wrong = not self.is_correct and not any(value > 0 for value in self.values)
        return is_stable and (self.probe.check == "gold" or is_wrong)

    def has(self, outcome: Outcome) -> bool:
        return outcome in (self.first.score.outcome, self.second.score.outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """The outcomes of one check's texts; `correct` is a score above 0.5."""

    tried: int = 0
    correct: int = 0
    no_verdict: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The outcome of an audit.

    `gold_tried` examples had a right answer to try, and `gold_correct` of them scored as correct; for `gold_unknown` no
    answer is known. `lowest_gold` is the lowest score of a right answer. Seconds are the faster of two tries.
    """

    examples: int
    gold_tried: int
    gold_correct: int
    gold_unknown: int
    lowest_gold: float | None
    checks: Mapping[str, Tally]
    seconds_mean: float
    seconds_max: float
    timeout_s: float | None
    findings: tuple[AuditFinding, ...]

    @property
    def errors(self) -> tuple[AuditFinding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Findings grouped by severity and cause, errors first."""
        groups: dict[tuple[str, str], list[AuditFinding]] = {}
        for finding in sorted(self.findings, key=lambda finding: finding.severity):  # "error" < "warning"
            groups.setdefault((finding.severity, finding.cause), []).append(finding)
        return tuple(Cause(findings=tuple(group)) for group in groups.values())

    @property
    def ok(self) -> bool:
        return not self.errors

    @property
    def others(self) -> Tally:
        rest = [tally for check, tally in self.checks.items() if check != "gold"]
        return Tally(**{name: sum(getattr(tally, name) for tally in rest) for name in Tally.__slots__})

    def line(self, of: str = "Reward") -> str:
        gold = f"gold {self.gold_correct}/{self.gold_tried} correct" if self.gold_tried else "gold not tried"
        unknown = f" ({self.gold_unknown} without a known answer)" if self.gold_unknown else ""
        others = f"{self.others.correct} of {self.others.tried} others correct"
        parts = [f"{self.examples} examples", gold + unknown, others, f"{duration(self.seconds_mean)} a score"]
        severities = [cause.first.severity for cause in self.causes]
        counts = [counted(severities.count(word), word) for word in dict.fromkeys(severities)]
        verdict = ["ok", *counts] if self.ok else counts
        return f"{of} audit: {', '.join(parts)}: {', '.join(verdict)}"
