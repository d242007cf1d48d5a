"""Everything that `retrain capacity` says about a configuration, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.manager import Plugins
from retrain.rooms.capacity.advice import advise
from retrain.rooms.capacity.history import Past, past_runs
from retrain.rooms.capacity.locate import model_folder
from retrain.rooms.capacity.machine import memory_limit
from retrain.rooms.capacity.memory import Estimate, estimate
from retrain.rooms.capacity.shape import ModelShape, read_shape
from retrain.rooms.capacity.walltime import Schedule, schedule_of
from retrain.rooms.capacity.workload import ASSUMED_PROMPT_TOKENS, Workload, workload_of

KNOWN_BACKEND = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Memory and time of a configuration, what they rest on, and what to change when it does not fit."""

    shape: ModelShape
    work: Workload
    estimate: Estimate
    schedule: Schedule
    past: Past
    limit_bytes: int | None
    advice: str

    @property
    def is_prompt_assumed(self) -> bool:
        """Neither a past run nor the user has said how long the prompts are."""
        return self.past.prompt_tokens is None and self.work.prompt_tokens == ASSUMED_PROMPT_TOKENS

    def as_data(self) -> dict[str, Any]:
        """As JSON: bytes, seconds, tokens."""
        found, past = self.estimate, self.past
        step_s = past.median_step_time_s
        return {
            "device": self.work.device,
            "parameters": self.shape.parameters,
            "parameters_are_counted": self.shape.is_counted,
            "lora_parameters": self.shape.lora_parameters(self.work.lora_rank),
            "prompt_tokens": self.work.prompt_tokens,
            "prompt_tokens_are_assumed": self.is_prompt_assumed,
            "completions_per_step": self.work.completions,
            "max_tokens_per_step": self.work.completions * self.work.max_tokens,
            "peak_memory_bytes": found.peak_bytes,
            "peak_phase": found.worst.name,
            "needed_memory_bytes": found.needed_bytes,
            "completions_at_a_time": found.at_once,
            "pack_tokens": found.pack_tokens,
            "resident": {phase.name: dict(phase.resident) for phase in found.phases},
            "phases": {phase.name: {**phase.parts, "peak": phase.peak_bytes} for phase in found.phases},
            "biggest_tensor": str(found.biggest),
            "memory_limit_bytes": self.limit_bytes,
            "fix": self.advice,
            "runs": self.schedule.runs,
            "parallelism": self.schedule.parallelism,
            "total_steps": self.schedule.total_steps,
            "median_step_time_s": step_s,
            "wall_time_s": None if step_s is None else self.schedule.seconds(step_s),
            "past_runs": past.runs,
            "past_peak_memory_bytes": past.peak_memory_bytes,
        }


def forecast(
    config: Config, plugins: Plugins, *, prompt_tokens: int = 0, fetch: bool = False, past: Past | None = None
) -> Forecast:
    """What the configuration needs here; `past` takes the place of what `logs/` holds (a pilot, for instance).

    ConfigError when the model's sizes cannot be read, or the backend is one whose memory is not known.
    """
    if config.backend.backend != KNOWN_BACKEND:
        what = f"the memory of backend {config.backend.backend!r} is not known, only that of {KNOWN_BACKEND!r}"
        raise ConfigError(Problem(where=config.place("backend.backend"), what=what, fix="measure it with --pilot 3"))
    shape = read_shape(model_folder(config, plugins, fetch=fetch), where=config.place("model.model"))
    past = past or past_runs(config, Path(config.logging.log_dir).expanduser().parent)
    work = workload_of(config, prompt_tokens=prompt_tokens or past.prompt_tokens or 0, context=shape.context)
    limit = memory_limit(config.backend.devices)
    runtime = _runtime(past, shape, work, limit)

    def estimated(changed: Workload) -> Estimate:
        return estimate(shape, changed, runtime_bytes=runtime, device_bytes=limit)

    return Forecast(
        shape=shape,
        work=work,
        estimate=estimated(work),
        schedule=schedule_of(config),
        past=past,
        limit_bytes=limit,
        advice=advise(work, limit, estimated) if limit else "",
    )


def _runtime(past: Past, shape: ModelShape, work: Workload, limit: int | None) -> int | None:
    """What a process needs beside the model, from past ones with this model loaded; on a GPU none has told."""
    if past.memory_at_start_bytes is None or work.device != "cpu":
        return None
    resident = estimate(shape, work, runtime_bytes=0, device_bytes=limit).phases[0].resident
    loaded = sum(resident.get(name, 0) for name in ("weights", "sampler", "adapter"))
    return max(0, past.memory_at_start_bytes - loaded)
