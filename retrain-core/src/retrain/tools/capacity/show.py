"""A forecast as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.memory import MemoryPhase
from retrain.kernel.errors import RetrainError
from retrain.kernel.registry import Plugins
from retrain.text.amounts import duration, size
from retrain.tools.capacity.forecast import Forecast, Past, RunTime, forecast, run_time


def text(forecast: Forecast, *, has_time: bool = True) -> str:
    """Memory by phase, what to change, and time; without it for a machine that is not this one."""
    found, work, model = forecast.estimate, forecast.work, forecast.model
    counted = "counted in its files" if model.is_counted else "by formula"
    prompt = (
        " (assumed; a past run, --pilot or --prompt-tokens gives the real length)" if forecast.is_prompt_assumed else ""
    )
    trained = f"LoRA {model.lora_parameters:,d}" if work.lora_rank else "all of them trained"
    lines = [
        f"Model    {model.parameters:,d} parameters ({counted}), {trained}",
        f"Step     {work.completions:,d} completions of up to {work.max_tokens:,d} tokens = "
        f"{work.completions * work.max_tokens:,d} tokens; prompts of up to {work.prompt_tokens:,d} tokens{prompt}",
        "",
        f"Memory on {work.device}, when every completion reaches its limit:",
        *_always(found.phases),
    ]
    limit = forecast.limit_bytes
    of_limit = f", {100 * found.peak_bytes / limit:.0f} % of {size(limit)}" if limit else ""
    at_once = "" if work.is_served else f"{found.at_once:,d} of {work.most_sampled:,d} completions sampled, "
    lines += [f"  {phase.name:<9} {_parts(phase.parts)}; peak {size(phase.peak_bytes)}" for phase in found.phases]
    lines += [
        f"  peak      {size(found.peak_bytes)} in {found.worst.name}{of_limit}",
        f"  biggest   {found.biggest}",
        f"  at once   {at_once}packs of {found.pack_tokens:,d} tokens",
    ]
    if found.needed_bytes < found.peak_bytes:
        lines.append(f"  at least  {size(found.needed_bytes)}, with one completion at a time")
    if model.checkpoint_bytes:
        lines.append(f"  on disk   {size(model.checkpoint_bytes)} for every checkpoint")
    if forecast.past.peak_memory_bytes:
        lines.append(f"  measured  {size(forecast.past.peak_memory_bytes)} in {_past(forecast)}")
    if forecast.advice:
        lines.append(f"  does not fit: {forecast.advice}")
    return "\n".join([*lines, *(["", *_time(forecast)] if has_time else ())])


def as_data(forecast: Forecast) -> dict[str, Any]:
    """As JSON: bytes, seconds, tokens."""
    found, past = forecast.estimate, forecast.past
    return {
        "device": forecast.work.device,
        "parameters": forecast.model.parameters,
        "parameters_are_counted": forecast.model.is_counted,
        "lora_parameters": forecast.model.lora_parameters,
        "checkpoint_bytes": forecast.model.checkpoint_bytes,
        "prompt_tokens": forecast.work.prompt_tokens,
        "prompt_tokens_are_assumed": forecast.is_prompt_assumed,
        "completions_per_step": forecast.work.completions,
        "max_tokens_per_step": forecast.work.completions * forecast.work.max_tokens,
        "peak_memory_bytes": found.peak_bytes,
        "peak_phase": found.worst.name,
        "needed_memory_bytes": found.needed_bytes,
        "completions_at_a_time": found.at_once,
        "pack_tokens": found.pack_tokens,
        "resident": {phase.name: dict(phase.resident) for phase in found.phases},
        "phases": {phase.name: {**phase.parts, "peak": phase.peak_bytes} for phase in found.phases},
        "biggest_tensor": str(found.biggest),
        "memory_limit_bytes": forecast.limit_bytes,
        "fix": forecast.advice,
        "runs": forecast.time.schedule.runs,
        "parallelism": forecast.time.schedule.parallelism,
        "total_steps": forecast.time.schedule.total_steps,
        "median_step_time_s": past.median_step_time_s,
        "training_time_s": forecast.time.training_s,
        "evaluation_time_s": forecast.time.evaluation_s,
        "wall_time_s": forecast.time.total_s,
        "time_fix": forecast.time.warning,
        "past_runs": past.runs,
        "past_peak_memory_bytes": past.peak_memory_bytes,
    }


def _time(forecast: Forecast) -> list[str]:
    time, step_s = forecast.time, forecast.past.median_step_time_s
    if step_s is None:
        work = " and ".join(filter(None, (time.training, time.evaluation)))
        lines = [f"Time     {work}; the time of a step is not known yet: add --pilot 3"]
    else:
        at_once = f" / {time.schedule.parallelism} at a time" if time.schedule.parallelism > 1 else ""
        median = f"{duration(step_s)} (median of {_past(forecast)})"
        lines = [f"Time     {time.training} x {median}{at_once} = {duration(time.training_s)}"]
        if time.evaluation:
            known = f" = {duration(time.evaluation_s)}; together {duration(time.total_s)}"
            lines += [f"         {time.evaluation}{known if time.evaluation_s else ': time not known yet'}"]
    return lines + ([f"         {time.warning}"] if time.warning else [])


def _past(forecast: Forecast) -> str:
    return "one run here" if forecast.past.runs == 1 else f"{forecast.past.runs} runs here"


def _always(phases: Sequence[MemoryPhase]) -> list[str]:
    """Resident memory, printed once if all phases share a device."""
    if all(phase.resident == phases[0].resident for phase in phases):
        return [f"  always    {_parts(phases[0].resident)}"]
    return [f"  always    in {phase.name}: {_parts(phase.resident)}" for phase in phases]


def _parts(parts: Mapping[str, int]) -> str:
    shown = [f"{name.replace('_', ' ')} {size(count)}" for name, count in parts.items() if count >= 2**19]
    return ", ".join(shown) or "next to nothing"


# Memory and time in `retrain explain` and `run.json`.


def explained(config: Config, plugins: Plugins) -> dict[str, str]:
    """Rows for `retrain explain`; nothing is downloaded, and an unknown peak is marked as such."""
    try:
        found = forecast(config, plugins)
    except RetrainError as error:
        return {"peak_memory": f"unknown: {error.problems[0].what}"} | _time_rows(run_time(config, Past()), None)
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
    return rows | _time_rows(found.time, found.past.median_step_time_s)


def _time_rows(time: RunTime, step_s: float | None) -> dict[str, str]:
    rows = time.rows()
    if step_s is not None:
        runs = f"{time.schedule.runs} runs, " if time.schedule.runs > 1 else ""
        rows["wall_time"] = f"{duration(time.total_s)} ({runs}{duration(step_s)} per step, as before here)"
    return rows | ({"time_fix": time.warning} if time.warning else {})
