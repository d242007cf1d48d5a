"""The suite of health monitors: the same findings in the same lines, after a resume and with absent fields too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from retrain.observe.health.contract import Finding
from retrain.testing.bench import Bench
from retrain.testing.check import expect, expect_same, expect_unchanged, resumed
from retrain.testing.toys import STEPS, collapsing, lines

RESUME_AT = STEPS // 2 + 4
STATE_NAME = re.compile(r"[a-z][a-z0-9_]*")


def finds_what_can_be_told(bench: Bench) -> None:
    """`observe` returns Findings: a lower-case name, a message, and "warn" or "stop"."""
    monitor = bench.build()
    for line in collapsing():
        _observe(monitor, line)


def bears_lines_that_lack_fields(bench: Bench) -> None:
    """It accepts lines with only a step, with None, and with unknown fields."""
    monitor = bench.build()
    for line in lines():
        for poorer in (
            {"step": line["step"]},
            {**dict.fromkeys(line), "step": line["step"]},
            {**line, "unheard_of": "x"},
        ):
            _observe(monitor, poorer)


def leaves_lines_alone(bench: Bench) -> None:
    """It does not modify the lines it observes."""
    monitor = bench.build()
    for line in collapsing():
        given = dict(line)
        _observe(monitor, given)
        what = f"the line of step {line['step']}"
        expect_unchanged(given == line, what, why="it is written to metrics.jsonl after that")


def repeats_its_findings(bench: Bench) -> None:
    """A second instance finds the same in the same lines."""
    first, again = ([_observe(m, line) for line in collapsing()] for m in (bench.build(), bench.build()))
    why, fix = "findings must depend only on the lines", "use no clock, no randomness and no state of the module"
    expect(first == again, "two monitors found different things in the same lines", why=why, fix=fix)


def goes_on_after_a_resume(bench: Bench) -> None:
    """Restored from its state, after a JSON round trip, it has the findings of an uninterrupted run."""
    monitor, all_lines = bench.build(), collapsing()
    for line in all_lines[:RESUME_AT]:
        _observe(monitor, line)
    again = resumed(bench, monitor)
    went_on, after = ([_observe(m, line) for line in all_lines[RESUME_AT:]] for m in (monitor, again))
    expect_same(went_on, after, what="findings")


def _observe(monitor: Any, line: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    findings = monitor.observe(line)
    for finding in findings:
        expect(
            isinstance(finding, Finding)
            and STATE_NAME.fullmatch(finding.state)
            and bool(finding.message.strip())
            and finding.severity in ("warn", "stop"),
            f"observe() returned {finding!r:.200}",
            why="the state is a field of metrics.jsonl, and the user reads the message",
            fix='return retrain.api.Finding(state="lower_case", message="cause, and the key to change")',
        )
    return [(finding.state, finding.message, finding.severity) for finding in findings]
