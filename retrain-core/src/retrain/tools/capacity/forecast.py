"""Everything that `retrain capacity` says about a configuration, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.memory import MemoryEstimate, MemoryModel, Workload
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.tools.capacity.history import Past, RunTime, past_runs, run_time
from retrain.tools.capacity.workload import ASSUMED_PROMPT_TOKENS, SAFETY, memory_limit, workload_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Memory and time of a configuration, the data behind them, and what to change if it does not fit."""

    model: MemoryModel
    work: Workload
    estimate: MemoryEstimate
    time: RunTime
    past: Past
    limit_bytes: int | None
    runtime_bytes: int | None

    @property
    def advice(self) -> str:
        """What to change if it does not fit; empty if it does."""
        limit = self.limit_bytes
        if not limit or self.estimate.needed_bytes <= int(limit * SAFETY[self.work.device]):
            return ""
        from retrain.tools.capacity.advice import advise  # most forecasts fit

        def estimated(changed: Workload) -> MemoryEstimate:
            return self.model.estimate(changed, self.runtime_bytes, limit)

        return advise(self.work, limit, estimated, can_quantise=self.model.can_quantise)

    @property
    def is_prompt_assumed(self) -> bool:
        """Whether the prompt length is a guess: neither a past run nor the user gives it."""
        return self.past.prompt_tokens is None and self.work.prompt_tokens == ASSUMED_PROMPT_TOKENS


def forecast(
    config: Config,
    plugins: Plugins,
    *,
    prompt_tokens: int = 0,
    fetch: bool = False,
    past: Past | None = None,
    gpu_bytes: int | None = None,
    sizes: Mapping[str, Any] | None = None,
) -> Forecast:
    """What the configuration needs on this machine; `past` (of a pilot, for instance) replaces the runs in `logs/`.

    With `gpu_bytes` it is what the configuration needs on CUDA GPUs of that memory, whatever this machine has. `sizes`
    takes the place of the model's `config.json`.
    ConfigError if the model's sizes cannot be read, or no plugin estimates the backend's memory.
    """
    with TemporaryDirectory() as scratch:
        folder = partial(model_folder, config, plugins, fetch=fetch, scratch=Path(scratch), sizes=sizes)
        name = config.backend.backend
        model: MemoryModel | None = plugins.call_backend("estimate_memory", config, folder, backend=name)
    if model is None:
        what = f"no plugin knows how much memory backend {name!r} needs"
        raise ConfigError(Problem(where=config.place("backend.backend"), what=what, fix="measure it with --pilot 3"))
    if past is None:  # runs of this machine say nothing about another
        past = Past() if gpu_bytes else past_runs(config)
    prompt, device = prompt_tokens or past.prompt_tokens or 0, "cuda" if gpu_bytes else None
    work = workload_of(config, prompt_tokens=prompt, context=model.context, device=device)
    limit = gpu_bytes or memory_limit(config.backend.devices)
    runtime = _runtime(past, model, work, limit)
    return Forecast(
        model=model,
        work=work,
        estimate=model.estimate(work, runtime, limit),
        time=run_time(config, past),
        past=past,
        limit_bytes=limit,
        runtime_bytes=runtime,
    )


def model_folder(
    config: Config,
    plugins: Plugins,
    name: str = "",
    *,
    fetch: bool,
    scratch: Path,
    sizes: Mapping[str, Any] | None,
) -> Path:
    """A folder with the `config.json` of the run's model, or of the model `name`; its weights are not needed.

    It is local, shipped by a plugin, in the hub's cache, or written below `scratch`: from `sizes` for the run's model,
    or from the table of known models. `fetch` downloads that of any other model. ConfigError if there is none.
    """
    if sizes is not None and not name:
        from retrain.tools.capacity.shapes import write_document

        return write_document(sizes, scratch / "sizes")
    where = config.place("teacher.model" if name else "model.model")
    name = name or config.model.model
    located = plugins.locate_model(name)
    folder = Path(located or name).expanduser()
    if located is not None or folder.is_dir():
        return folder
    from retrain.tools.capacity.shapes import folder_of_known  # only for a model that is not here

    return folder_of_known(name, where, fetch=fetch, scratch=scratch)


def _runtime(past: Past, model: MemoryModel, work: Workload, limit: int | None) -> int | None:
    """What a process needs beside the model, from past runs with this model; on a GPU it is not measured."""
    if past.memory_at_start_bytes is None or work.device != "cpu":
        return None
    resident = model.estimate(work, 0, limit).phases[0].resident
    loaded = sum(resident.get(name, 0) for name in ("weights", "sampler", "adapter"))
    return max(0, past.memory_at_start_bytes - loaded)
