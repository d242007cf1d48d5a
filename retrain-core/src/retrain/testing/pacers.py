"""The suite of pacers: set the number of prompts of each step, at least 1, and back off when memory runs out."""

from __future__ import annotations

from typing import Any

from retrain.kernel.contracts.views import PaceView
from retrain.testing.bench import Bench
from retrain.testing.check import expect, expect_plain_metrics, expect_same, resumed

STEPS = 40
RESUME_AT = 17
TOKENS_PER_COMPLETION = 50
ODD_STEPS: tuple[dict[str, Any], ...] = (
    {"sampled_tokens": 0},
    {"step_time_s": 0.0},
    {"has_trained": False},
    {"sampled_tokens": 10**9, "step_time_s": 1e-6},
)


def wants_at_least_one_prompt(bench: Bench) -> None:
    """`batch_size` is an integer of at least 1 at every step, whatever the earlier measurements."""
    for seconds in (0.01, 1.0, 1e4):
        pacer = bench.build()
        for step in range(STEPS):
            pacer.observe(_view(bench, step, _size(pacer, step), step_time_s=seconds))


def changes_only_when_it_observes(bench: Bench) -> None:
    """Called again before the next `observe`, it returns the same."""
    pacer = bench.build()
    for step in range(RESUME_AT):
        size, again = _size(pacer, step), _size(pacer, step)
        why = "a run calls it more than once, and samples as many prompts as the last call returned"
        fix = "change state in observe() only"
        expect(size == again, f"batch_size({step}) is {size}, then {again}", why=why, fix=fix)
        pacer.observe(_view(bench, step, size))


def backs_off_when_memory_runs_out(bench: Bench) -> None:
    """After `out_of_memory` it sets fewer prompts, down to 1, and does not return at once to as many."""
    pacer = bench.build()
    for step in range(RESUME_AT):
        pacer.observe(_view(bench, step, _size(pacer, step)))
    failed = _size(pacer, RESUME_AT)
    while failed > 1:
        group_size = bench.config.training.group_size
        # The same step again: a run repeats it with fewer prompts and does not move on.
        pacer.observe(PaceView(step=RESUME_AT, batch_size=failed, group_size=group_size, out_of_memory=True))
        size = _size(pacer, RESUME_AT)
        expect(
            size < failed,
            f"a step of {failed} prompts ran out of memory, and it wants {size} next",
            why="the same step is tried again with that number; one that is not smaller ends the run",
            fix="lower the batch size in observe() when view.out_of_memory is set",
        )
        failed = size


def bears_steps_that_say_nothing(bench: Bench) -> None:
    """It accepts steps without tokens, without an optimizer step or without any measured time."""
    pacer = bench.build()
    for step in range(STEPS):
        pacer.observe(_view(bench, step, _size(pacer, step), **ODD_STEPS[step % len(ODD_STEPS)]))
        expect_plain_metrics(pacer.metrics(), allows_text=True)


def goes_on_after_a_resume(bench: Bench) -> None:
    """Restored from its state, after a JSON round trip, it sets the batch sizes it would have set."""
    pacer = bench.build()
    for step in range(RESUME_AT):
        pacer.observe(_view(bench, step, _size(pacer, step)))
    again = resumed(bench, pacer)
    expect_same(_size(pacer, RESUME_AT), _size(again, RESUME_AT), what="the batch size of the next step")
    expect_plain_metrics(again.metrics(), allows_text=True)


def _view(bench: Bench, step: int, size: int, **changes: Any) -> PaceView:
    """Return a step; its throughput grows with its size, and flattens."""
    group_size = bench.config.training.group_size
    completions = size * group_size
    fields: dict[str, Any] = {
        "sampled_tokens": completions * TOKENS_PER_COMPLETION,
        "step_time_s": 0.5 + 0.05 * completions,
        "has_trained": True,
    }
    return PaceView(step=step, batch_size=size, group_size=group_size, **(fields | changes))


def _size(pacer: Any, step: int) -> int:
    size = pacer.batch_size(step)
    expect(
        isinstance(size, int) and not isinstance(size, bool) and size >= 1,
        f"batch_size({step}) is {size!r}",
        why="a step samples that many prompts",
        fix="return an int of at least 1",
    )
    return int(size)
