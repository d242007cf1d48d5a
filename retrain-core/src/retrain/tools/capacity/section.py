"""Memory and time in `retrain explain` and `run.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import RetrainError
from retrain.kernel.registry import Plugins
from retrain.text.terminal_text import duration
from retrain.tools.capacity.evaluation_time import RunTime, run_time
from retrain.tools.capacity.forecast import forecast
from retrain.tools.capacity.history import Past, past_runs
from retrain.tools.capacity.show import size


def explained(config: Config, plugins: Plugins) -> dict[str, str]:
    """Rows for `retrain explain`; nothing is downloaded, and an unknown peak is marked as such."""
    try:
        found = forecast(config, plugins)
    except RetrainError as error:
        return {"peak_memory": f"unknown: {error.problems[0].what}"} | _time(run_time(config, Past()), None)
    rows = {
        "peak_memory": f"{size(found.estimate.peak_bytes)} in {found.estimate.worst.name} on {found.work.device}",
        "biggest_tensor": str(found.estimate.biggest),
    }
    if found.limit_bytes:
        fits = "does not fit" if found.advice else "fits"
        rows["peak_memory"] += f", of {size(found.limit_bytes)}: {fits}"
    if not found.work.is_served:
        rows["sampled_at_a_time"] = f"{found.estimate.at_once:,d} of {found.work.most_sampled:,d} completions"
    if found.advice:
        rows["memory_fix"] = found.advice
    return rows | _time(found.time, found.past.median_step_time_s)


def time_lines(config: Config, steps_done: int) -> tuple[str, str]:
    """The times of training and evaluation for the start of a run, and a warning; each may be empty.

    A resumed run gets no warning, because the keys of its evaluations are fixed.
    """
    past = past_runs(config, Path(config.logging.log_dir).expanduser().parent)
    time = run_time(config, past, steps_done=steps_done)
    rows = time.rows()
    line = f"Time: training about {rows['training_time']}, evaluation about {rows['evaluation_time']}." if rows else ""
    return line, "" if steps_done else time.warning


def predicted(config: Config, plugins: Plugins) -> dict[str, Any]:
    """The forecast for `run.json`, or the reason why there is none."""
    try:
        found = forecast(config, plugins)
    except RetrainError as error:
        return {"unknown": error.problems[0].what}
    data = found.as_data()
    names = ("peak_memory_bytes", "peak_phase", "prompt_tokens", "prompt_tokens_are_assumed", "median_step_time_s")
    return {name: data[name] for name in names} | {
        "peak_memory_bytes_by_phase": {phase.name: phase.peak_bytes for phase in found.estimate.phases}
    }


def _time(time: RunTime, step_s: float | None) -> dict[str, str]:
    rows = time.rows()
    if step_s is not None:
        runs = f"{time.schedule.runs} runs, " if time.schedule.runs > 1 else ""
        rows["wall_time"] = f"{duration(time.total_s)} ({runs}{duration(step_s)} per step, as before here)"
    return rows | ({"time_fix": time.warning} if time.warning else {})
