"""The sizes of a run's steps, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrain.kernel.config.plugin_tables import SetsKeys
from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.memory import Workload
from retrain.tools.capacity.machine import device_kind
from retrain.tools.capacity.walltime import is_campaign

ASSUMED_PROMPT_TOKENS = 256  # until a run has measured the prompts


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
