"""The findings of an audit, and the error or warnings that they cause. A run with a sound reward does not load it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from retrain.kernel.errors import Problem, RewardError
from retrain.kernel.types import Example, Outcome, Score
from retrain.tasks.audit.probes import Severity
from retrain.tasks.audit.report import AuditFinding, AuditReport, Cause, Tried
from retrain.tasks.scoring.failures import next_step
from retrain.text.amounts import counted
from retrain.text.secrets import hide_text
from retrain.text.terminal_text import printable

LOG = logging.getLogger("retrain")
SHOWN = 5  # causes in an error; the command shows all
HEAD_CHARS = 80
DETAIL_CHARS = 300
# A wrong text that gets this share of the right answer's score counts as accepted.
NEARLY = 0.9


def report_data(report: AuditReport) -> dict[str, Any]:
    """Return the documented JSON form."""
    gold = {"tried": report.gold_tried, "correct": report.gold_correct, "unknown": report.gold_unknown}
    return {
        "ok": report.ok,
        "examples": report.examples,
        "gold": {**gold, "lowest": report.lowest_gold},
        "others": asdict(report.others),
        "checks": {check: asdict(tally) for check, tally in report.checks.items()},
        **{name: getattr(report, name) for name in ("seconds_mean", "seconds_max", "timeout_s")},
        "causes": [cause.as_data() for cause in report.causes],
        "findings": [asdict(finding) for finding in report.findings],
    }


def raise_on_failure(report: AuditReport, policy: str, *, place: str = "[scoring] audit", of: str = "Reward") -> None:
    """RewardError under the policy "stop" when the reward failed; otherwise, and for warnings, one log line per cause.

    The error lists at most five causes. `place` is where the policy was set, `of` the name of the audited verifier.
    """
    if policy == "stop" and not report.ok:
        errors = [cause for cause in report.causes if cause.first.severity == "error"]
        more = f", {SHOWN} of them below" if len(errors) > SHOWN else ""
        what = f"the reward failed its audit: {counted(len(errors), 'error')}{more}"
        fix = 'repair the reward (`retrain audit` tries it without a run), or set [scoring] audit = "warn"'
        shown = [
            Problem(
                code="reward.failed-audit",
                where=f"{cause.first.check}, {where_found(cause, report.examples)}",
                what=cause.first.message,
                why=f"text: {cause.first.text!r}",
                fix=cause.first.fix,
            )
            for cause in errors[:SHOWN]
        ]
        raise RewardError(Problem(code="reward.failed-audit", where=place, what=what, fix=fix), *shown)
    for cause in report.causes:
        first, where = cause.first, where_found(cause, report.examples)
        text = f" ({first.text!r})" if first.check != "time" else ""
        LOG.warning("%s audit, %s: %s: %s%s; fix: %s", of, first.severity, where, first.message, text, first.fix)


def where_found(cause: Cause, examples: int) -> str:
    name = printable(cause.first.example_id)
    return f"example {name}" if len(cause.findings) == 1 else f"{cause.examples} of {examples} examples, first {name}"


def head(text: str) -> str:
    shown = printable(text[:HEAD_CHARS])
    return shown if len(text) <= HEAD_CHARS else f"{shown}..."


def findings_of(
    answers: Iterable[tuple[Example, str, Sequence[Tried]]],
    tried: Iterable[Tried],
    best_of: Mapping[str, float],
    slowest: Tried | None,
    timeout_s: float,
) -> Iterator[AuditFinding]:
    """Yield all findings.

    `answers` are the examples, faults of their `gold`, and the tries of their right answer if its score counts;
    `best_of` are the highest scores of right answers by example; `slowest` is given if it is too slow.
    """
    for example, fault, right in answers:
        if fault:
            yield _finding("error", "gold", example, "", _safe(fault), "repair the reward's gold method")
        if right and not any(t.is_correct for t in right):
            yield _never_right(example, right)
        elif right and (best := best_of[example.id]) < 1.0:
            shown, message = " or ".join(t.probe.text for t in right), f"the right answer scored {best:g}, not 1"
            cause, fix = "the right answer does not score 1", "let a fully right answer score 1"
            yield _finding("warning", "gold", example, shown, message, fix, cause)
    for each in tried:
        yield from _text_findings(each, best_of[each.probe.example.id])
    if slowest is not None:
        yield _slow(slowest, timeout_s)


def _never_right(example: Example, tried: Sequence[Tried]) -> AuditFinding:
    values = [value for t in tried for value in t.values]
    reason = next((t.first.score.detail for t in tried if t.first.score.detail), "")
    fix = "choose another [reward], repair the data, or let the reward's gold(example) return an answer that scores 1"
    message = f"the right answer scored {max(values):g}" if values else "the right answer got no verdict"
    if not values and reason:
        message, fix = f"{message}: {_safe(reason)}", next_step(reason) or fix
    shown = " or ".join(t.probe.text for t in tried)
    return _finding("error", "gold", example, shown, message, fix, "the right answer is not correct")


def _text_findings(tried: Tried, best: float) -> Iterator[AuditFinding]:
    probe, scores = tried.probe, (tried.first.score, tried.second.score)
    if tried.has(Outcome.FAILED):
        detail = next(score.detail for score in scores if score.outcome is Outcome.FAILED)
        message = f"scoring failed: {_safe(detail)}"
        fix, cause = next_step(detail) or "let no text break the reward", "scoring failed"
        yield _finding("error", probe.check, probe.example, probe.text, message, fix, cause)
    elif (scores[0].outcome, scores[0].value) != (scores[1].outcome, scores[1].value):
        message = f"the same text scored {_shown(scores[0])}, then {_shown(scores[1])}"
        fix, cause = "take randomness and memory out of the reward", "the same text scored differently"
        yield _finding("error", probe.check, probe.example, probe.text, message, fix, cause)
    if probe.check == "gold":
        return
    severity = probe.severity if max(tried.values, default=0.0) >= NEARLY * best else probe.partial
    if tried.is_correct and severity:
        message = f"{probe.message} (scored {max(tried.values):g})"
        yield _finding(severity, probe.check, probe.example, probe.text, message, probe.fix, probe.message)
    elif probe.check == "empty" and any(value > 0 for value in tried.values):
        message, cause = f"an empty answer scores {max(tried.values):g}", "an empty answer scores above 0"
        yield _finding("warning", "empty", probe.example, probe.text, message, probe.fix, cause)


def _slow(slowest: Tried, timeout_s: float) -> AuditFinding:
    share = 100 * slowest.seconds / timeout_s
    message = f"the slowest score took {slowest.seconds:.2g} s, {share:.0f} % of the time limit of {timeout_s:g} s"
    fix = "raise [scoring] timeout_s, or make the reward faster"
    return _finding("warning", "time", slowest.probe.example, slowest.probe.text, message, fix)


def _safe(detail: str) -> str:
    return printable(hide_text(detail))[:DETAIL_CHARS]


def _finding(
    severity: Severity, check: str, example: Example, text: str, message: str, fix: str, cause: str = ""
) -> AuditFinding:
    return AuditFinding(
        severity=severity,
        check=check,
        example_id=example.id,
        text=head(text),
        message=message,
        fix=fix,
        cause=cause or message,
    )


def _shown(score: Score) -> str:
    return f"{score.value:g}" if score.value is not None else score.outcome.value.replace("_", " ")
