"""The suite of controllers: one number in [0, 1] per step, and the same numbers after a resume."""

from __future__ import annotations

from typing import Any

from retrain.credit.specs import ControllerView
from retrain.kernel.seeding import Seeds
from retrain.records.reading import number
from retrain.testing.bench import Bench
from retrain.testing.check import expect, expect_plain_metrics, expect_same, resumed

STEPS = 60
RESUME_AT = 23


def gives_a_number_between_0_and_1(bench: Bench) -> None:
    """`value(step)` is finite and in [0, 1] at every step, from the first to far past the last."""
    controller = bench.build()
    for step, view in enumerate(_views()):
        _value(controller, step)
        controller.observe(view)
    _value(controller, 10**6)


def changes_only_when_it_observes(bench: Bench) -> None:
    """Called twice for one step, `value` returns the same number."""
    controller = bench.build()
    for step, view in enumerate(_views()[:RESUME_AT]):
        first, again = _value(controller, step), _value(controller, step)
        why = "a step that is retried, for example with fewer prompts, calls it again"
        fix = "change state in observe() only"
        expect(first == again, f"value({step}) is {first}, then {again}", why=why, fix=fix)
        controller.observe(view)


def repeats_its_schedule(bench: Bench) -> None:
    """A second instance returns the same numbers."""
    first, again = (_run(bench.build(), 0, STEPS) for _ in range(2))
    why, fix = "one seed is one run", "use no randomness but context.seeds, and no clock"
    expect(first == again, "two runs with the same observations got different numbers", why=why, fix=fix)


def goes_on_after_a_resume(bench: Bench) -> None:
    """Restored from its state, after a JSON round trip, it continues with the same numbers."""
    controller = bench.build()
    _run(controller, 0, RESUME_AT)
    again = resumed(bench, controller)
    rest = _run(controller, RESUME_AT, STEPS)
    expect_same(rest, _run(again, RESUME_AT, STEPS), what=f"values and metrics from step {RESUME_AT} on")


def reports_plain_metrics(bench: Bench) -> None:
    """`metrics()` returns finite numbers and booleans, even before the first step."""
    controller = bench.build()
    expect_plain_metrics(controller.metrics(), allows_text=False)
    for step, view in enumerate(_views()):
        controller.value(step)
        controller.observe(view)
        expect_plain_metrics(controller.metrics(), allows_text=False)


def _views() -> list[ControllerView]:
    """Return the steps of a run that learns; some of them measure nothing."""
    stream = Seeds(0).stream("conformance controller")
    return [
        ControllerView(
            step=step,
            correct_rate=None if step % 11 == 3 else min(1.0, step / 40 + float(stream.random()) / 10),
            execution_variance=None if step % 7 == 2 else float(stream.exponential(2.0 / (step + 1))),
        )
        for step in range(STEPS)
    ]


def _value(controller: Any, step: int) -> float:
    value = controller.value(step)
    why, fix = "it is lambda, the strength with which credit is pooled", "return a float in [0, 1]"
    expect(number(value) is not None and 0 <= value <= 1, f"value({step}) is {value!r}", why=why, fix=fix)
    return float(value)


def _run(controller: Any, start: int, end: int) -> list[tuple[float, dict[str, Any]]]:
    seen = []
    for step, view in list(enumerate(_views()))[start:end]:
        value = _value(controller, step)
        controller.observe(view)
        seen.append((value, dict(controller.metrics())))
    return seen
