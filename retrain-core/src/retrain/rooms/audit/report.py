"""The report of an audit: what was tried, what was found, and whether that stops a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from retrain.kernel.errors import Problem, RewardError
from retrain.rooms.audit.probes import Severity
from retrain.rooms.text.terminal_text import duration, printable

LOG = logging.getLogger("retrain")
SHOWN = 5  # findings in an error or on the console; the command shows all
HEAD_CHARS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFinding:
    """Something wrong with the reward: `text` is the beginning of the scored text, `check` its kind."""

    severity: Severity
    check: str
    example_id: str
    text: str
    message: str
    fix: str


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
    def ok(self) -> bool:
        """Whether there is no error."""
        return not self.errors

    @property
    def others(self) -> Tally:
        """All texts that must not be correct."""
        rest = [tally for check, tally in self.checks.items() if check != "gold"]
        return Tally(
            tried=sum(tally.tried for tally in rest),
            correct=sum(tally.correct for tally in rest),
            no_verdict=sum(tally.no_verdict for tally in rest),
            failed=sum(tally.failed for tally in rest),
        )

    def line(self) -> str:
        """`Reward audit: 8 examples, gold 8/8 correct, 0 of 96 others correct, 0.3 ms a score: ok`"""
        gold = f"gold {self.gold_correct}/{self.gold_tried} correct" if self.gold_tried else "gold not tried"
        unknown = f" ({self.gold_unknown} without a known answer)" if self.gold_unknown else ""
        others = f"{self.others.correct} of {self.others.tried} others correct"
        parts = [f"{self.examples} examples", gold + unknown, others, f"{duration(self.seconds_mean)} a score"]
        counts = [counted(len(self.errors), "error"), counted(len(self.warnings), "warning")]
        verdict = (["ok"] if self.ok else []) + [count for count in counts if not count.startswith("0 ")]
        return f"Reward audit: {', '.join(parts)}: {', '.join(verdict)}"

    def as_data(self) -> dict[str, Any]:
        """The documented JSON form."""
        return {
            "ok": self.ok,
            "examples": self.examples,
            "gold": {
                "tried": self.gold_tried,
                "correct": self.gold_correct,
                "unknown": self.gold_unknown,
                "lowest": self.lowest_gold,
            },
            "others": asdict(self.others),
            "checks": {check: asdict(tally) for check, tally in self.checks.items()},
            "seconds_mean": self.seconds_mean,
            "seconds_max": self.seconds_max,
            "timeout_s": self.timeout_s,
            "findings": [asdict(finding) for finding in self.findings],
        }


def raise_on_failure(report: AuditReport, policy: str, *, place: str = "[scoring] audit") -> None:
    """RewardError under the policy "stop" when the reward failed; otherwise, and for warnings, one log line per kind.

    The error lists at most five findings, of as many kinds as possible. `place` is where the policy was set.
    """
    if policy == "stop" and not report.ok:
        more = f", {SHOWN} of them below" if len(report.errors) > SHOWN else ""
        what = f"the reward failed its audit: {counted(len(report.errors), 'finding')}{more}"
        fix = 'repair the reward (`retrain audit` tries it alone), or set [scoring] audit = "warn"'
        shown = [_problem(finding) for finding in varied(report.errors)]
        raise RewardError(Problem(where=place, what=what, fix=fix), *shown)
    kinds: dict[tuple[str, str], list[AuditFinding]] = {}
    for finding in (*report.errors, *report.warnings):
        kinds.setdefault((finding.check, finding.message), []).append(finding)
    for first, *others in kinds.values():
        more = f" ({len(others)} more like it)" if others else ""
        LOG.warning("Reward audit, %s: %s%s", first.severity, _in_one_line(first), more)


def varied(findings: Sequence[AuditFinding], limit: int = SHOWN) -> list[AuditFinding]:
    """The first of every kind, then the second of every kind, and so on, up to `limit`."""
    seen: dict[tuple[str, str], int] = {}
    ranked = []
    for finding in findings:
        kind = (finding.check, finding.message)
        ranked.append((seen.setdefault(kind, 0), finding))
        seen[kind] += 1
    return [finding for _, finding in sorted(ranked, key=lambda pair: pair[0])[:limit]]


def head(text: str) -> str:
    """The beginning of a text, safe to print."""
    shown = printable(text[:HEAD_CHARS])
    return shown if len(text) <= HEAD_CHARS else f"{shown}..."


def counted(count: int, word: str) -> str:
    """`1 error`, `2 errors`."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def _in_one_line(finding: AuditFinding) -> str:
    text = f" ({finding.text!r})" if finding.check != "time" else ""
    return f"example {printable(finding.example_id)}: {finding.message}{text}; fix: {finding.fix}"


def _problem(finding: AuditFinding) -> Problem:
    where = f"{finding.check}, example {printable(finding.example_id)}"
    return Problem(where=where, what=finding.message, why=f"text: {finding.text!r}", fix=finding.fix)
