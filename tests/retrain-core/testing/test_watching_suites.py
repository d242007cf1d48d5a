"""The suites of controllers, pacers, monitors, recorders and detectors distinguish sound parts from broken ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kit.shared import first_or_long

Failures = Callable[..., dict[str, str]]
SOUND = (
    ("controller", "Controller"),
    ("pacer", "Pacer"),
    ("health monitor", "Monitor"),
    ("recorder", "Recorder"),
    ("planning detector", "Detector"),
)
BROKEN = (
    ("controller", "TooHigh", "gives_a_number_between_0_and_1", "value(0) is 1.5"),
    ("controller", "RisesWhenAsked", "changes_only_when_it_observes", "value(0) is 0.01, then 0.02"),
    ("controller", "Rolls", "repeats_its_schedule", "different numbers"),
    ("controller", "Forgets", "goes_on_after_a_resume", "without a resume"),
    ("controller", "NoJson", "goes_on_after_a_resume", "state() is not JSON"),
    ("controller", "BadMetric", "reports_plain_metrics", "'level' = inf"),
    ("pacer", "NoPrompts", "wants_at_least_one_prompt", "batch_size(6) is 0"),
    ("pacer", "GrowsWhenAsked", "changes_only_when_it_observes", "batch_size(0) is 17, then 18"),
    ("pacer", "NeverBacksOff", "backs_off_when_memory_runs_out", "16 prompts ran out of memory, and it wants 16"),
    ("pacer", "Divides", "bears_steps_that_say_nothing", "ZeroDivisionError"),
    ("pacer", "StartsAnew", "goes_on_after_a_resume", "the batch size of the next step: 33 without a resume, 16"),
    ("health monitor", "SaysText", "finds_what_can_be_told", "'all is lost'"),
    ("health monitor", "ShoutsStates", "finds_what_can_be_told", "CUT OFF"),
    ("health monitor", "NeedsFields", "bears_lines_that_lack_fields", "KeyError: 'truncation_rate'"),
    ("health monitor", "WritesLines", "leaves_lines_alone", "has changed the line of step -1"),
    ("health monitor", "RollsFindings", "repeats_its_findings", "different things"),
    ("health monitor", "ForgetsRows", "goes_on_after_a_resume", "findings: "),
    ("recorder", "NeedsNumbers", "records_a_whole_run", "TypeError"),
    ("recorder", "NeedsAStart", "can_be_finished_before_it_started", "AttributeError"),
    ("recorder", "NeedsSuccess", "lets_go_of_a_run_that_failed", "the run broke"),
    ("recorder", "PopsTheStep", "leaves_lines_alone", "has changed the line of step -1"),
    ("recorder", "CannotRestore", "goes_on_after_a_resume", "there is no restore()"),
    ("recorder", "StartsOnce", "goes_on_after_a_resume", "FileExistsError"),
    ("planning detector", "OneMaskShort", "marks_every_token", "6 masks for 7 completions"),
    ("planning detector", "MasksOfNumbers", "marks_every_token", "is float64"),
    ("planning detector", "NeedsTokens", "marks_every_token", "IndexError"),
    ("planning detector", "WritesTokens", "leaves_tokens_alone", "has changed the tokens"),
    ("planning detector", "RollsMarks", "repeats_its_marks", "other marks"),
)


@pytest.mark.parametrize(("kind", "part"), first_or_long(SOUND))
def test_sound_parts_pass(kind: str, part: str, failures: Failures) -> None:
    assert failures(kind, f"watching_parts.{part}") == {}


@pytest.mark.parametrize(("kind", "part", "check", "words"), BROKEN)
def test_broken_parts_are_named(kind: str, part: str, check: str, words: str, failures: Failures) -> None:
    assert words in failures(kind, f"watching_parts.{part}", only=check)[check]
