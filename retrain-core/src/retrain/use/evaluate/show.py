"""The table of `retrain eval`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from retrain.use.evaluate.subjects import Result

PASS = "pass_at_"
HEADS = ("policy", "steps", "set", "examples", "correct", "95 %", "pass@k", "reward")
NOTE = (
    "Each interval is about one policy. Whether two differ, also for another seed: `retrain compare` over runs of "
    "several seeds."
)


def table_lines(results: Sequence[Result]) -> list[str]:
    """A row per policy and set, and notes below."""
    rows = [HEADS, *(_row(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    notes = list(dict.fromkeys(_notes(results)))
    folders = list(dict.fromkeys(str(result.file.parent) for result in results))
    return [*lines, "", *notes, f"Scores of every example: {', '.join(folders)}"]


def _row(result: Result) -> tuple[str, ...]:
    fields, subject = result.fields, result.subject
    return (
        subject.label,
        "-" if subject.steps is None else str(subject.steps),
        result.set,
        f"{fields['examples']} x {fields['samples']}",
        f"{100 * fields['correct_rate']:.1f}%",
        f"[{100 * fields['ci_low']:.1f}, {100 * fields['ci_high']:.1f}]",
        _passed(fields),
        f"{fields['mean_reward']:.3f}" if "mean_reward" in fields else "none",
    )


def _passed(fields: Mapping[str, Any]) -> str:
    """`@1 41.0 @4 63.2`, in percent."""
    sizes = sorted(int(name.removeprefix(PASS)) for name in fields if name.startswith(PASS))
    return " ".join(f"@{size} {100 * fields[f'{PASS}{size}']:.1f}" for size in sizes)


def _notes(results: Sequence[Result]) -> Iterator[str]:
    repeated = [(result, *result.own) for result in results if result.own]
    if same := sum(total for _, equal, total in repeated if equal == total):
        yield f"{same} samples are those of the run's own evaluation at that step."
    for result, equal, total in repeated:
        if equal < total:
            of_run = f"{result.subject.label}, {result.set}: {total - equal} of {total} samples differ from those"
            yield f"{of_run} of the run's own evaluation: another machine, engine or version, or rounding."
    if len({(result.subject.label, result.subject.steps) for result in results}) > 1:
        yield NOTE
