"""What `run.json`, `metrics.jsonl` and `eval.jsonl` say about a run's tokens, seconds and held-out results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from retrain.inspect.signal.causes import RunFacts, StepFacts
from retrain.kernel.declared import CORRECT_ABOVE
from retrain.kernel.errors import ConfigError
from retrain.records.controls import Control, control_of_record
from retrain.records.reading import Record, number
from retrain.records.run import Run
from retrain.records.runs.metric import HELD_OUT, eval_sets


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A run by its lines: facts for causes, what was spent, held-out rates by step, and what nobody can count.

    `seconds` are those of steps, without evaluations and warm-up. `eval_tokens` is None where the lines of evaluations
    have no lengths. `sft_tokens` are of given answers: trained, not drawn.
    """

    facts: RunFacts
    seconds: float
    eval_tokens: int | None
    sft_tokens: int
    held_out: Mapping[int, float]
    notes: tuple[str, ...]
    correct_above: float
    group_size: int


def read_recorded(run: Run) -> Recorded:
    """The lines of a run; ConfigError names the first damaged one."""
    lines = [record for _, record in run.steps()]
    training, scoring = run.table("training"), run.table("scoring")
    steps = [record for record in lines if record["step"] >= 0]
    facts = RunFacts(
        steps={record["step"]: _facts(record) for record in steps},
        is_no_update=control_of_record(run.record) is Control.NO_UPDATE,
        leaves_truncated=training.get("overlong", "keep") != "keep",
    )
    eval_tokens, eval_note = _eval_tokens(run, [record for record in lines if _is_evaluated(record)])
    above = number(scoring.get("correct_above"))
    return Recorded(
        facts=facts,
        seconds=sum(number(record.get("step_time_s")) or 0.0 for record in steps),
        eval_tokens=eval_tokens,
        sft_tokens=sum(int(number(record.get("sft_tokens")) or 0) for record in lines),
        held_out={r["step"]: v for r in lines if (v := number(r.get(HELD_OUT.field))) is not None},
        notes=tuple(note for note in (*_notes(steps, run.record), eval_note) if note),
        correct_above=CORRECT_ABOVE if above is None else above,
        group_size=int(number(training.get("group_size")) or 0),
    )


def _facts(record: Record) -> StepFacts:
    sampled = number(record.get("sampled_tokens"))
    return StepFacts(
        sampled_tokens=None if sampled is None else int(sampled),
        is_rejected="rejected" in record and not record.get("num_datums"),
    )


def _is_evaluated(record: Record) -> bool:
    return HELD_OUT.field in record or bool(eval_sets(record))


def _eval_tokens(run: Run, evaluated: list[Record]) -> tuple[int | None, str]:
    """Tokens of the evaluations, and what to say where they cannot be counted."""
    if not evaluated:
        return 0, ""
    tokens = 0
    try:
        for record in run.evaluations(required=True):
            tokens += sum(record["lengths"])
    except (ConfigError, KeyError, TypeError):
        return None, f"the tokens of {_times(len(evaluated), 'evaluation')} are not recorded"
    return tokens, ""


def _notes(steps: list[Record], manifest: Record) -> list[str]:
    """What was drawn and is in no record; numbers where there are some, and no guesses."""
    lost = sum("sampled_tokens" not in record for record in steps)
    dropped = sum(int(number(record.get("dropped_call_count")) or 0) for record in steps)
    resumes = manifest.get("resumes")
    resumed = len(resumes) if isinstance(resumes, list) else 0
    memory = any("bp_ceiling" in record for record in steps)
    return [
        f"{_times(lost, 'step')} rejected while sampling: those tokens are not recorded" if lost else "",
        f"{_times(dropped, 'answer')} that no agent received: those tokens are not recorded" if dropped else "",
        f"resumed {_times(resumed, 'time')}: what was sampled again after a checkpoint is not recorded"
        if resumed
        else "",
        "memory ran out: what was sampled in vain before the step was tried with less is not recorded"
        if memory
        else "",
    ]


def _times(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
