"""What an audit's report says, as a line, as data, as an error and in the log."""

from __future__ import annotations

import json
import logging

import pytest

from retrain.kernel.errors import RewardError
from retrain.rooms.audit.probes import Severity
from retrain.rooms.audit.report import AuditFinding, AuditReport, Tally, head, raise_on_failure, varied


def finding(number: int, check: str = "echo", severity: Severity = "error") -> AuditFinding:
    return AuditFinding(
        severity=severity,
        check=check,
        example_id=f"e{number}",
        text=f"t{number}",
        message=f"{check} counts",
        fix="mend",
    )


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
    assert report(finding(0), finding(1), finding(2, severity="warning")).line() == f"{head_of_all}2 errors, 1 warning"
    assert "gold 3/3 correct (5 without a known answer)" in report(gold_tried=3, gold_unknown=5).line()
    assert "gold not tried (8 without a known answer)" in report(gold_tried=0, gold_unknown=8).line()


def test_the_data_is_json() -> None:
    content = json.loads(json.dumps(report(finding(0)).as_data(), allow_nan=False))
    assert content["ok"] is False
    assert content["gold"] == {"tried": 8, "correct": 8, "unknown": 0, "lowest": 1.0}
    assert content["others"] == {"tried": 40, "correct": 2, "no_verdict": 0, "failed": 1}
    assert content["checks"]["hack"] == {"tried": 24, "correct": 2, "no_verdict": 0, "failed": 1}
    assert content["findings"] == [
        {
            "severity": "error",
            "check": "echo",
            "example_id": "e0",
            "text": "t0",
            "message": "echo counts",
            "fix": "mend",
        }
    ]


def test_stop_raises_with_five_findings_of_as_many_kinds() -> None:
    many = [finding(n) for n in range(20)] + [finding(n, "hack") for n in range(20)] + [finding(40, "gold")]
    with pytest.raises(RewardError) as caught:
        raise_on_failure(report(*many), "stop", place="retrain.toml:7 [scoring] audit")
    first, *shown = caught.value.problems
    assert first.where == "retrain.toml:7 [scoring] audit"
    assert first.what == "the reward failed its audit: 41 findings, 5 of them below"
    assert '[scoring] audit = "warn"' in first.fix
    assert [problem.where.partition(",")[0] for problem in shown] == ["echo", "hack", "gold", "echo", "hack"]
    raise_on_failure(report(finding(0, severity="warning")), "stop")
    raise_on_failure(report(), "stop")


def test_warn_tells_each_kind_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    errors = [finding(n, check) for check in ("echo", "hack") for n in range(9)]
    with caplog.at_level(logging.WARNING, "retrain"):
        raise_on_failure(report(*errors, finding(99, "time", "warning")), "warn")
    assert len(caplog.records) == 3
    assert caplog.text.count("(8 more like it)") == 2
    assert "Reward audit, error: example e0: echo counts ('t0'); fix: mend" in caplog.text
    assert "Reward audit, warning: example e99: time counts; fix: mend" in caplog.text


def test_a_few_of_every_kind_in_their_order() -> None:
    errors = [finding(0), finding(1), finding(2, "hack"), finding(3)]
    assert [each.example_id for each in varied(errors)] == ["e0", "e2", "e1", "e3"]
    assert [each.example_id for each in varied(errors, 2)] == ["e0", "e2"]


def test_what_is_shown_is_short_and_harmless() -> None:
    assert head("a\x1b[31mb\n") == "a\ufffd[31mb\ufffd"
    assert len(head("x" * 1000)) == 83
