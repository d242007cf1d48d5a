"""Progress of a phase of a run, as data for `heartbeat.json` and as text for a console."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from retrain.kernel.contracts.context import PhaseProgress, PluginContext
from retrain.text.amounts import counted, duration
from retrain.text.terminal_text import printable

SCORES = "scores"  # the unit of scoring; sampling has the same counters
# Larger numbers come from a damaged file.
MOST = 1e12


def progress_of(context: PluginContext, phase: str, since: float) -> dict[str, Any]:
    """Unit, done, total, tokens, their rate and the time left of a phase that began at `since` on the monotonic clock.

    Empty before the first report. Unfinished completions are assumed to need all their tokens, so the time left shrinks
    faster than the clock when they end early; without limit and tokens it follows from the share that is done.
    """
    shown = context.sampling_progress if phase in ("sampling", "scoring", "eval") else None
    # While the model starts, its tensors are counted.
    if phase in ("training", "starting"):
        shown = context.training_progress
    if shown is None or not shown.total or (phase == "scoring" and shown.unit != SCORES):
        return {}
    is_of_step_before = shown.started < since and shown.done >= shown.total
    return {} if is_of_step_before else progress_data(shown)


def progress_data(shown: PhaseProgress) -> dict[str, Any]:
    """The same for counters that belong to the work under way."""
    # In the instant of the start, the rate would divide by zero.
    elapsed_s = max(time.monotonic() - shown.started, 1e-9)
    tokens = max(shown.tokens, shown.drawn)
    data = {"unit": shown.unit, "done": shown.done, "total": shown.total}
    data |= {"tokens": tokens, "tokens_per_s": round(tokens / elapsed_s, 1)} if tokens else {}
    missing, left_s = shown.total - shown.done, None
    if shown.limit and shown.drawn > shown.tokens:  # tokens of unfinished completions are known
        left = missing * shown.limit - (shown.drawn - shown.tokens)
        left_s = max(left, 0) * elapsed_s / shown.drawn
    elif shown.done:
        left_s = missing * elapsed_s / shown.done
    return data | ({} if left_s is None else {"time_left_s": round(left_s, 1)})


def share_of(data: Mapping[str, Any]) -> float | None:
    """The share of a phase that is over, in [0, 1]; None where nothing is known. The data may come from a file.

    Completions often end together, so the share is one of time where the rate of tokens is known.
    """
    numbers = _numbers(data)
    if numbers.get("tokens_per_s") and {"tokens", "time_left_s"} <= numbers.keys():
        elapsed_s = numbers["tokens"] / numbers["tokens_per_s"]
        return elapsed_s / (elapsed_s + numbers["time_left_s"]) if elapsed_s else 0.0
    return min(numbers.get("done", 0) / numbers["total"], 1.0) if numbers.get("total") else None


def progress_text(data: Mapping[str, Any], *, has_time: bool = True) -> str:
    """`12/32 completions, 5,210 tokens, 340 tokens/s, about 9.0 s left`; the data may come from a file."""
    numbers = _numbers(data)
    if not {"done", "total"} <= numbers.keys():
        return ""
    parts = [f"{numbers['done']:,}/{numbers['total']:,} {printable(str(data.get('unit', '')))}".rstrip()]
    parts += [f"{numbers['tokens']:,} tokens"] if "tokens" in numbers else []
    parts += [f"{numbers['tokens_per_s']:,.0f} tokens/s"] if "tokens_per_s" in numbers else []
    left_s = numbers.get("time_left_s", 0) if has_time else 0
    parts += [f"about {duration(left_s)} left"] if left_s > 0 else []
    return ", ".join(parts)


def phase_text(phase: str, step: float, elapsed_s: float, data: Mapping[str, Any]) -> str:
    """`sampling, step 3, for 12 s: 12/32 completions, ...`; step -1 is the evaluation before training."""
    when = f"step {int(min(step, MOST))}" if step >= 0 else "before training" if step >= -1 else "warm-up, "
    when += warm_up_left(step) if step < -1 else ""
    text = progress_text(data)
    return f"{printable(phase)}, {when}, for {duration(min(elapsed_s, MOST))}" + (f": {text}" if text else "")


def warm_up_left(step: float) -> str:
    """Warm-up steps left at a negative step, itself included: they end with step -2."""
    return f"{counted(int(min(-step, MOST)) - 1, 'step')} left"


def _numbers(data: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in data.items() if type(value) in (int, float) and 0 <= value < MOST}
