"""The sizes of a run's steps, the memory of this machine, and the schedule of a run or a campaign."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from retrain.kernel.config.plugin_tables import SetsKeys
from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.memory import Workload
from retrain.records.campaign_table import CampaignTable, is_campaign, steps_per_run
from retrain.records.reading import number

ASSUMED_PROMPT_TOKENS = 256  # until a run has measured the prompts
# Usable share of memory: on a CPU the estimate may be 15 % low, on a GPU it is an upper bound.
SAFETY = {"cpu": 0.9, "cuda": 0.95}


def workload_of(
    config: Config, *, prompt_tokens: int = 0, context: int | None = None, device: str | None = None
) -> Workload:
    """Return the largest step of a configuration: with back pressure, `max_batch_size` prompts.

    `device` replaces the kind of device that the configuration finds on this machine.
    """
    training, options = config.training, config.backend.options
    batch_size = training.batch_size
    if config.backpressure.enabled:
        batch_size = max(batch_size, config.backpressure.max_batch_size)
    prompt = prompt_tokens or ASSUMED_PROMPT_TOKENS
    room = max(1, context - prompt) if context else training.max_tokens
    checkpointing = options.get("gradient_checkpointing", "auto")
    return Workload(
        device=device or device_kind(config.backend.devices),
        batch_size=batch_size,
        group_size=training.group_size,
        max_tokens=min(training.max_tokens, room),
        prompt_tokens=prompt,
        lora_rank=config.model.lora_rank,
        eval_completions=eval_completions_of(config),
        micro_batch_tokens=int(positive(options.get("micro_batch_tokens")) or 0),
        cache_bytes=int((positive(options.get("cache_gb")) or 0) * 2**30),
        # A campaign deals its devices to its runs, so that each of them has one.
        samplers=0 if is_campaign(config) else config.backend.devices.count(","),
        is_served=config.inference.engine != "pytorch",
        is_sharing=config.inference.prefix_caching,
        gradient_checkpointing=checkpointing if isinstance(checkpointing, str) else "auto",
        model_dtype=config.value("model.dtype", "auto"),
        dtype=config.inference.dtype,
        kv_cache_dtype=config.inference.kv_cache_dtype,
        quantize=config.value("model.quantize", "none"),
    )


def eval_completions_of(config: Config) -> int:
    """Return the completions of one evaluation, sets of known size included."""
    samples = config.eval.samples
    sets: Mapping[str, Any] = config.table("eval", SetsKeys).sets
    sizes = ((each.get("examples", 0), 1 if each.get("greedy") else each.get("samples")) for each in sets.values())
    tasks: Sequence[Mapping[str, Any]] = config.value("data.tasks", ())
    own: list[int] = [each.get("held_out", config.eval.examples) for each in tasks] or [config.eval.examples]
    return sum(own) * samples + sum(int(n) * int(s or samples) for n, s in sizes if isinstance(n, int))


def positive(value: object) -> float | None:
    """Return a number that may not have been checked yet; None unless it is above 0 and plausible."""
    found = number(value)
    return found if found is not None and 0 < found < 1e18 else None


CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
NVIDIA_SMI_S = 10.0


@cache
def gpu_memory_bytes() -> tuple[int, ...]:
    """Return the memory of each NVIDIA GPU, by index; empty if `nvidia-smi` does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    command = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True)
        return tuple(int(line) * 2**20 for line in done.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()


def device_kind(devices: str) -> str:
    """Return `cuda` if the first device is a GPU that exists, otherwise `cpu`, the backend's fallback."""
    first = devices.split(",")[0].strip()
    return "cuda" if first.startswith("gpu") and gpu_memory_bytes() else "cpu"


def memory_limit(devices: str) -> int | None:
    """Return the bytes of the configured device, of several the smallest; None if the system does not say."""
    if device_kind(devices) == "cpu":
        try:
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            return None
        for file in CGROUP_LIMITS:
            with suppress(OSError, ValueError):  # absent outside of a container, `max` without a limit
                total = min(total, int(file.read_text()))
        return total
    sizes = gpu_memory_bytes()
    names = [name.strip().removeprefix("gpu").removeprefix(":") for name in devices.split(",")]
    numbers = [int(name) if name.isdigit() else 0 for name in names]
    return min(sizes[number] for number in numbers) if max(numbers) < len(sizes) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Runs of `max_steps` steps each, `parallelism` of them at a time."""

    runs: int
    max_steps: int
    parallelism: int

    @property
    def total_steps(self) -> int:
        return self.runs * self.max_steps

    def seconds(self, run_s: float) -> float:
        return self.runs * run_s / self.parallelism


def schedule_of(config: Config) -> Schedule:
    """Return one run, or the runs of `[campaign]`: all at once, or `max_workers` at a time."""
    if not is_campaign(config):
        return Schedule(runs=1, max_steps=config.training.max_steps, parallelism=1)
    table = config.table("campaign", CampaignTable)
    runs = max(1, len(table.conditions)) * max(1, len(table.seeds))
    parallelism = min(table.max_workers or runs, runs) if table.parallel else 1
    return Schedule(runs=runs, max_steps=steps_per_run(config), parallelism=parallelism)


def evaluations(max_steps: int, every: int, steps_done: int = 0) -> int:
    """Number of evaluations of a run: before the first step, after every `every` steps, and after the last."""
    between = (max_steps - 1) // every - steps_done // every if every else 0
    return (steps_done == 0) + max(between, 0) + (steps_done < max_steps)
