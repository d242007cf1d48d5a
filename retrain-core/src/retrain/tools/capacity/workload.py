"""The sizes of a run's steps, from its configuration."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from retrain.kernel.config.plugin_tables import SetsKeys
from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.memory import Workload
from retrain.records.campaign_table import CampaignTable, is_campaign
from retrain.run.configure import steps_per_run

ASSUMED_PROMPT_TOKENS = 256  # until a run has measured the prompts
# Usable share of memory: on a CPU the estimate may be 15 % low, on a GPU it is an upper bound.
SAFETY = {"cpu": 0.9, "cuda": 0.95}


def workload_of(
    config: Config, *, prompt_tokens: int = 0, context: int | None = None, device: str | None = None
) -> Workload:
    """The largest step of a configuration: with back pressure, `max_batch_size` prompts.

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
        micro_batch_tokens=int(_positive(options, "micro_batch_tokens")),
        cache_bytes=int(_positive(options, "cache_gb") * 2**30),
        samplers=0 if is_campaign(config) else config.backend.devices.count(","),  # a campaign assigns them to its runs
        is_served=config.inference.engine != "pytorch",
        is_sharing=config.inference.prefix_caching,
        gradient_checkpointing=checkpointing if isinstance(checkpointing, str) else "auto",
        model_dtype=config.value("model.dtype", "auto"),
        dtype=config.inference.dtype,
        kv_cache_dtype=config.inference.kv_cache_dtype,
        quantize=config.value("model.quantize", "none"),
    )


def eval_completions_of(config: Config) -> int:
    """Completions of one evaluation, those of the sets of known size included."""
    return config.eval.examples * config.eval.samples + _completions_of_sets(config)


def _completions_of_sets(config: Config) -> int:
    """Completions of the further evaluation sets that say how many examples they have."""
    sets: Mapping[str, Any] = config.table("eval", SetsKeys).sets
    sizes = ((each.get("examples", 0), 1 if each.get("greedy") else each.get("samples")) for each in sets.values())
    return sum(int(n) * int(samples or config.eval.samples) for n, samples in sizes if isinstance(n, int))


def _positive(options: dict[str, Any], name: str) -> float:
    """A size from options that may not have been checked yet."""
    value = options.get(name, 0)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and 0 < value < 2**40 else 0


# Memory of this machine, and the kind of device that a configuration selects on it.


CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_ASK_S = 10.0


@cache
def gpu_memory_bytes() -> tuple[int, ...]:
    """Total memory of each NVIDIA GPU, by index; empty if `nvidia-smi` does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    command = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=True)
        return tuple(int(line) * 2**20 for line in done.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()


def host_memory_bytes() -> int | None:
    """Memory that this process may use, of the machine or its container; None if the system does not say."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
    limits = [limit for file in CGROUP_LIMITS if (limit := _limit(file)) is not None]
    return min([total, *limits])


def device_kind(devices: str) -> str:
    """`cuda` if the first device is a GPU that exists, else `cpu`, which the backend falls back to."""
    first = devices.split(",")[0].strip()
    return "cuda" if first.startswith("gpu") and gpu_memory_bytes() else "cpu"


def memory_limit(devices: str) -> int | None:
    """Bytes of the configured device, of several the smallest; None if the system does not say."""
    if device_kind(devices) == "cpu":
        return host_memory_bytes()
    sizes = gpu_memory_bytes()
    names = [name.strip().removeprefix("gpu").removeprefix(":") for name in devices.split(",")]
    numbers = [int(name) if name.isdigit() else 0 for name in names]
    return min(sizes[number] for number in numbers) if max(numbers) < len(sizes) else None


def _limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


# Wall time of a run or a campaign from the median time of a step.


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Runs of `max_steps` steps each, `parallelism` of them at a time."""

    conditions: int
    seeds: int
    max_steps: int
    parallelism: int

    @property
    def runs(self) -> int:
        """conditions x seeds."""
        return self.conditions * self.seeds

    @property
    def total_steps(self) -> int:
        """conditions x seeds x max_steps."""
        return self.runs * self.max_steps

    def seconds(self, run_s: float) -> float:
        """runs x seconds of a run / parallelism."""
        return self.runs * run_s / self.parallelism


def schedule_of(config: Config) -> Schedule:
    """One run, or those of `[campaign]` if the file has that table: all at once, or `max_workers` at a time."""
    if not is_campaign(config):
        return Schedule(conditions=1, seeds=1, max_steps=config.training.max_steps, parallelism=1)
    table = config.table("campaign", CampaignTable)
    conditions, seeds = table.conditions, table.seeds
    runs = max(1, len(conditions)) * max(1, len(seeds))
    workers = table.max_workers or runs
    return Schedule(
        conditions=max(1, len(conditions)),
        seeds=max(1, len(seeds)),
        max_steps=steps_per_run(config),
        parallelism=min(workers, runs) if table.parallel else 1,
    )
