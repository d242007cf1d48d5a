"""What a pacer must do: set the number of prompts of each step, at least 1, and back off when memory runs out."""

from __future__ import annotations

from typing import Any

from retrain.kernel.contracts.pacing import PaceView
from retrain.testing.bench import Bench
from retrain.testing.check import expect
from retrain.testing.state import expect_plain_metrics, expect_plain_state, expect_same

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
        expect(
            size == again,
            f"batch_size({step}) is {size}, then {again}",
            why="a run asks more than once, and draws as many prompts as it was told last",
            fix="change state in observe() alone",
        )
        pacer.observe(_view(bench, step, size))


def backs_off_when_memory_runs_out(bench: Bench) -> None:
    """After `out_of_memory` it sets fewer prompts, down to 1, and does not return at once to as many."""
    pacer = bench.build()
    for step in range(RESUME_AT):
        pacer.observe(_view(bench, step, _size(pacer, step)))
    failed = _size(pacer, RESUME_AT)
    while failed > 1:
        pacer.observe(PaceView(step=RESUME_AT, batch_size=failed, group_size=_group_size(bench), out_of_memory=True))
        size = _size(pacer, RESUME_AT)
        expect(
            size < failed,
            f"a step of {failed} prompts ran out of memory, and it wants {size} next",
            why="the same step is tried again with that number; one that is not smaller ends the run",
            fix="lower the batch size in observe() when view.out_of_memory is set",
        )
        failed = size


def bears_steps_that_say_nothing(bench: Bench) -> None:
    """Steps without tokens, without an optimizer step or without any measured time do not break it."""
    pacer = bench.build()
    for step in range(STEPS):
        pacer.observe(_view(bench, step, _size(pacer, step), **ODD_STEPS[step % len(ODD_STEPS)]))
        expect_plain_metrics(pacer.metrics(), allows_text=True)


def goes_on_after_a_resume(bench: Bench) -> None:
    """Restored from its state, after a JSON round trip, it sets the batch sizes it would have set."""
    pacer = bench.build()
    for step in range(RESUME_AT):
        pacer.observe(_view(bench, step, _size(pacer, step)))
    resumed = bench.build()
    resumed.restore(expect_plain_state(pacer))
    expect_same(_size(pacer, RESUME_AT), _size(resumed, RESUME_AT), what="the batch size of the next step")
    expect_plain_metrics(resumed.metrics(), allows_text=True)


def _group_size(bench: Bench) -> int:
    return bench.config.training.group_size


def _view(bench: Bench, step: int, size: int, **changes: Any) -> PaceView:
    """A step whose throughput grows with its size, and flattens."""
    completions = size * _group_size(bench)
    fields: dict[str, Any] = {
        "sampled_tokens": completions * TOKENS_PER_COMPLETION,
        "step_time_s": 0.5 + 0.05 * completions,
        "has_trained": True,
    }
    return PaceView(step=step, batch_size=size, group_size=_group_size(bench), **(fields | changes))


def _size(pacer: Any, step: int) -> int:
    size = pacer.batch_size(step)
    expect(
        isinstance(size, int) and not isinstance(size, bool) and size >= 1,
        f"batch_size({step}) is {size!r}",
        why="a step draws that many prompts",
        fix="return an int of at least 1",
    )
    return int(size)


PACER = (
    wants_at_least_one_prompt,
    changes_only_when_it_observes,
    backs_off_when_memory_runs_out,
    bears_steps_that_say_nothing,
    goes_on_after_a_resume,
)
