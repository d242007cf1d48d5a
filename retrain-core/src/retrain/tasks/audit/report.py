"""The report of an audit: what was tried, what was found, and whether that stops a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from retrain.kernel.errors import Problem, RewardError
from retrain.tasks.audit.probes import Severity
from retrain.text.amounts import counted, duration
from retrain.text.terminal_text import printable

LOG = logging.getLogger("retrain")
SHOWN = 5  # causes in an error; the command shows all
HEAD_CHARS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFinding:
    """Something wrong with the reward: `text` is the beginning of the scored text, `check` its kind.

    `cause` is the message without what is particular to this text: findings of one cause are told once.
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
    """Findings with one severity and one cause."""

    findings: tuple[AuditFinding, ...]

    @property
    def first(self) -> AuditFinding:
        """The one to show."""
        return self.findings[0]

    @property
    def examples(self) -> int:
        """How many examples show it."""
        return len({finding.example_id for finding in self.findings})

    def as_data(self) -> dict[str, Any]:
        """The documented JSON form."""
        first, counts = self.first, {"examples": self.examples, "findings": len(self.findings)}
        return {"severity": first.severity, "check": first.check, "cause": first.cause, "fix": first.fix, **counts}


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
    answer is known. `lowest_gold` is the lowest score of a right answer. Seconds are those of the faster of two tries.
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
        """The findings that make the reward unfit to train on."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def warnings(self) -> tuple[AuditFinding, ...]:
        """The findings that a user should know but that do not stop a run."""
        return tuple(finding for finding in self.findings if finding.severity == "warning")

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The findings by their cause, errors first."""
        groups: dict[tuple[str, str], list[AuditFinding]] = {}
        for finding in sorted(self.findings, key=lambda finding: finding.severity):  # "error" < "warning"
            groups.setdefault((finding.severity, finding.cause), []).append(finding)
        return tuple(Cause(findings=tuple(group)) for group in groups.values())

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return not self.errors

    @property
    def others(self) -> Tally:
        """All texts that must not be correct."""
        rest = [tally for check, tally in self.checks.items() if check != "gold"]
        return Tally(**{name: sum(getattr(tally, name) for tally in rest) for name in Tally.__slots__})

    def line(self, of: str = "Reward") -> str:
        """`Reward audit: 8 examples, gold 8/8 correct, 0 of 184 others correct, 0.3 ms a score: ok`"""
        gold = f"gold {self.gold_correct}/{self.gold_tried} correct" if self.gold_tried else "gold not tried"
        unknown = f" ({self.gold_unknown} without a known answer)" if self.gold_unknown else ""
        others = f"{self.others.correct} of {self.others.tried} others correct"
        parts = [f"{self.examples} examples", gold + unknown, others, f"{duration(self.seconds_mean)} a score"]
        severities = [cause.first.severity for cause in self.causes]
        counts = [counted(severities.count(word), word) for word in dict.fromkeys(severities)]
        verdict = (["ok"] if self.ok else []) + counts
        return f"{of} audit: {', '.join(parts)}: {', '.join(verdict)}"

    def as_data(self) -> dict[str, Any]:
        """The documented JSON form."""
        gold = {"tried": self.gold_tried, "correct": self.gold_correct, "unknown": self.gold_unknown}
        return {
            "ok": self.ok,
            "examples": self.examples,
            "gold": {**gold, "lowest": self.lowest_gold},
            "others": asdict(self.others),
            "checks": {check: asdict(tally) for check, tally in self.checks.items()},
            **{name: getattr(self, name) for name in ("seconds_mean", "seconds_max", "timeout_s")},
            "causes": [cause.as_data() for cause in self.causes],
            "findings": [asdict(finding) for finding in self.findings],
        }


def raise_on_failure(report: AuditReport, policy: str, *, place: str = "[scoring] audit", of: str = "Reward") -> None:
    """RewardError under the policy "stop" when the reward failed; otherwise, and for warnings, one log line per cause.

    The error lists at most five causes. `place` is where the policy was set, `of` what was audited.
    """
    if policy == "stop" and not report.ok:
        errors = [cause for cause in report.causes if cause.first.severity == "error"]
        more = f", {SHOWN} of them below" if len(errors) > SHOWN else ""
        what = f"the reward failed its audit: {counted(len(errors), 'error')}{more}"
        fix = 'repair the reward (`retrain audit` tries it alone), or set [scoring] audit = "warn"'
        shown = [_problem(cause, report.examples) for cause in errors[:SHOWN]]
        raise RewardError(Problem(where=place, what=what, fix=fix), *shown)
    for cause in report.causes:
        first, where = cause.first, where_found(cause, report.examples)
        text = f" ({first.text!r})" if first.check != "time" else ""
        LOG.warning("%s audit, %s: %s: %s%s; fix: %s", of, first.severity, where, first.message, text, first.fix)


def where_found(cause: Cause, examples: int) -> str:
    """`example e0` for a single finding, else `8 of 8 examples, first e0`."""
    name = printable(cause.first.example_id)
    return f"example {name}" if len(cause.findings) == 1 else f"{cause.examples} of {examples} examples, first {name}"


def head(text: str) -> str:
    """The beginning of a text, safe to print."""
    shown = printable(text[:HEAD_CHARS])
    return shown if len(text) <= HEAD_CHARS else f"{shown}..."


def _problem(cause: Cause, examples: int) -> Problem:
    first, where = cause.first, f"{cause.first.check}, {where_found(cause, examples)}"
    return Problem(where=where, what=first.message, why=f"text: {first.text!r}", fix=first.fix)
