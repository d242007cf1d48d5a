"""What an audit's report says, as a line, as data, as an error and in the log."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict

import pytest

from retrain.kernel.errors import RewardError
from retrain.tasks.audit.findings import head, raise_on_failure, report_data
from retrain.tasks.audit.probes import Severity
from retrain.tasks.audit.report import AuditFinding, AuditReport, Tally
from tests.kit.problems import codes_in

HACK = Tally(tried=24, correct=2, failed=1)
CHECKS = {"gold": Tally(tried=8, correct=8), "echo": Tally(tried=16), "hack": HACK}


def finding(number: int, check: str = "echo", severity: Severity = "error") -> AuditFinding:
    message, cause = f"{check} counts (scored {number})", f"{check} counts"
    told = {"text": f"t{number}", "message": message, "fix": "mend", "cause": cause}
    return AuditFinding(severity=severity, check=check, example_id=f"e{number}", **told)


def report(*findings: AuditFinding, gold_tried: int = 8, gold_unknown: int = 0) -> AuditReport:
    return AuditReport(
        examples=8,
        gold_tried=gold_tried,
        gold_correct=gold_tried,
        gold_unknown=gold_unknown,
        lowest_gold=1.0 if gold_tried else None,
        checks={
            "gold": Tally(tried=8, correct=8),
            "echo": Tally(tried=16),
            "hack": Tally(tried=24, correct=2, failed=1),
        },
        seconds_mean=0.0003,
        seconds_max=1.25,
        timeout_s=10.0,
        findings=findings,
    )


def test_the_line() -> None:
    head_of_all = "Reward audit: 8 examples, gold 8/8 correct, 2 of 40 others correct, 0.3 ms a score: "
    assert report().line() == f"{head_of_all}ok"
    assert report(finding(0, severity="warning")).line() == f"{head_of_all}ok, 1 warning"
    assert report(finding(0), finding(1), finding(2, severity="warning")).line() == f"{head_of_all}1 error, 1 warning"
    assert report(finding(0), finding(1, "hack")).line() == f"{head_of_all}2 errors"
    assert "gold 3/3 correct (5 without a known answer)" in report(gold_tried=3, gold_unknown=5).line()
    assert "gold not tried (8 without a known answer)" in report(gold_tried=0, gold_unknown=8).line()


def test_the_data_is_json_and_reports_each_cause_once_errors_first() -> None:
    found = [finding(0, "time", "warning"), *(finding(n) for n in range(8)), finding(0)]
    content = json.loads(json.dumps(report_data(report(*found)), allow_nan=False))
    assert content["ok"] is False
    assert content["gold"] == {"tried": 8, "correct": 8, "unknown": 0, "lowest": 1.0}
    assert content["others"] == {"tried": 40, "correct": 2, "no_verdict": 0, "failed": 1}
    assert content["checks"]["hack"] == {"tried": 24, "correct": 2, "no_verdict": 0, "failed": 1}
    assert content["findings"] == [asdict(each) for each in found]
    assert content["causes"] == [
        {"severity": "error", "check": "echo", "cause": "echo counts", "fix": "mend", "examples": 8, "findings": 9},
        {"severity": "warning", "check": "time", "cause": "time counts", "fix": "mend", "examples": 1, "findings": 1},
    ]


def test_stop_raises_with_each_cause_once() -> None:
    many = [finding(n) for n in range(8)] + [finding(n, "hack") for n in range(8)] + [finding(4, "gold")]
    with pytest.raises(RewardError) as caught:
        raise_on_failure(report(*many), "stop", place="retrain.toml:7 [scoring] audit")
    assert set(codes_in(caught)) == {"reward.failed-audit"}
    first, *shown = caught.value.problems
    assert first.where == "retrain.toml:7 [scoring] audit"
    assert '[scoring] audit = "warn"' in first.fix
    assert [(problem.where, problem.what) for problem in shown] == [
        ("echo, 8 of 8 examples, first e0", "echo counts (scored 0)"),
        ("hack, 8 of 8 examples, first e0", "hack counts (scored 0)"),
        ("gold, example e4", "gold counts (scored 4)"),
    ]
    raise_on_failure(report(finding(0, severity="warning")), "stop")
    raise_on_failure(report(), "stop")
    with pytest.raises(RewardError, match="7 errors, 5 of them below") as caught:
        raise_on_failure(report(*(finding(0, f"check{n}") for n in range(7))), "stop")
    assert len(caught.value.problems) == 1 + 5


def test_warn_tells_each_cause_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    errors = [finding(n, check) for check in ("echo", "hack") for n in range(8)]
    with caplog.at_level(logging.WARNING, "retrain"):
        raise_on_failure(report(*errors, finding(99, "time", "warning")), "warn")
    assert caplog.messages == [
        "Reward audit, error: 8 of 8 examples, first e0: echo counts (scored 0) ('t0'); fix: mend",
        "Reward audit, error: 8 of 8 examples, first e0: hack counts (scored 0) ('t0'); fix: mend",
        "Reward audit, warning: example e99: time counts (scored 99); fix: mend",
    ]


def test_what_is_shown_is_short_and_harmless() -> None:
    assert head("a\x1b[31mb\n") == "a\ufffd[31mb\ufffd"
    assert len(head("x" * 1000)) == 83
