"""Memory and time in `retrain explain` and `run.json`."""

from __future__ import annotations

from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import RetrainError
from retrain.kernel.plugins.manager import Plugins
from retrain.rooms.capacity.forecast import Forecast, forecast
from retrain.rooms.capacity.show import size
from retrain.rooms.text.terminal_text import duration


def explained(config: Config, plugins: Plugins) -> dict[str, str]:
    """Rows for `retrain explain`; nothing is downloaded, and an unknown peak is marked as such."""
    try:
        found = forecast(config, plugins)
    except RetrainError as error:
        return {"peak_memory": f"unknown: {error.problems[0].what}"}
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
    return rows | _time(found)


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


def _time(found: Forecast) -> dict[str, str]:
    step_s = found.past.median_step_time_s
    if step_s is None:
        return {}
    runs = f"{found.schedule.runs} runs, " if found.schedule.runs > 1 else ""
    total = duration(found.schedule.seconds(step_s))
    return {"wall_time": f"{total} ({runs}{duration(step_s)} per step, as before here)"}
