"""The sizes of a run's steps, from its configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from retrain.capacity.local_backend import TRAIN_TOKENS
from retrain.capacity.machine import device_kind
from retrain.config.resolved import Config

ASSUMED_PROMPT_TOKENS = 256  # until a run has shown how long the prompts are


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a step holds: `prompt_tokens` is the longest prompt, `max_tokens` what every completion may reach."""

    device: str
    batch_size: int
    group_size: int
    max_tokens: int
    prompt_tokens: int
    lora_rank: int
    micro_batch_tokens: int
    eval_completions: int = 0

    def with_size(self, name: str, value: int) -> Workload:
        """The same with another number under one of its names."""
        changes: dict[str, Any] = {name: value}
        return replace(self, **changes)

    @property
    def completions(self) -> int:
        """Completions per step."""
        return self.batch_size * self.group_size

    @property
    def most_sampled(self) -> int:
        """Completions that are sampled together: a step's, or an evaluation's if those are more."""
        return max(self.completions, self.eval_completions)


def workload_of(config: Config, *, prompt_tokens: int = 0, context: int | None = None) -> Workload:
    """The largest step of a configuration: with back pressure on, one of `max_batch_size` prompts."""
    training, device = config.training, device_kind(config.backend.devices)
    batch_size = training.batch_size
    if config.value("backpressure.enabled", False):
        batch_size = max(batch_size, config.value("backpressure.max_batch_size", batch_size))
    prompt = prompt_tokens or ASSUMED_PROMPT_TOKENS
    room = max(1, context - prompt) if context else training.max_tokens
    return Workload(
        device=device,
        batch_size=batch_size,
        group_size=training.group_size,
        max_tokens=min(training.max_tokens, room),
        prompt_tokens=prompt,
        lora_rank=config.model.lora_rank,
        eval_completions=config.eval.examples * config.eval.samples,
        micro_batch_tokens=_micro_batch_tokens(config.backend.options) or TRAIN_TOKENS[device],
    )


def _micro_batch_tokens(options: dict[str, Any]) -> int:
    value = options.get("micro_batch_tokens", 0)
    return value if isinstance(value, int) and value > 0 else 0
