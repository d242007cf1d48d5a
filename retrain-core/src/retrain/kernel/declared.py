"""What a plugin declares about a part before importing it: its kind, a backend's capabilities, how a table is read.

This module needs only the standard library, so that `retrain --help` and completion stay fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

Function = Callable[..., Any] | str  # or "module:function", imported when it is called
CORRECT_ABOVE = 0.5  # default of [scoring] correct_above


class Kind(StrEnum):
    """Every kind of part that a TOML can name; the value is the word used in messages."""

    ADVANTAGE = "advantage"
    TRANSFORM = "transform"
    UNCERTAINTY = "uncertainty"
    ALGORITHM = "algorithm"
    RECIPE = "recipe"
    LOSS = "loss"
    PLANNING_DETECTOR = "planning detector"
    CONTROLLER = "controller"
    REWARD = "reward"
    DATA_SOURCE = "data source"
    ENVIRONMENT = "environment"
    BACKEND = "backend"
    INFERENCE_ENGINE = "inference engine"
    RECORDER = "recorder"
    HEALTH_MONITOR = "health monitor"
    PACER = "pacer"
    SAMPLER = "sampler"
    LAUNCHER = "launcher"
    CONFIG_TABLE = "config table"
    COMMAND = "command"
    TEMPLATE = "init template"


class CheckpointMode(StrEnum):
    """What a backend can restore after a restart."""

    EXACT = "exact"
    ADAPTER_ONLY = "adapter_only"
    UNSUPPORTED = "unsupported"


class Determinism(StrEnum):
    """When the same seed gives the same run."""

    EXACT = "exact"
    SAME_MACHINE = "same_machine"
    NONE = "none"


WEAKEST_FIRST = (Determinism.NONE, Determinism.SAME_MACHINE, Determinism.EXACT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend promises; configurations that need more are refused before anything heavy loads.

    `regularisers` are those of `kl_reward` (`reference_logprobs`), `kl_loss`, `entropy`, `kl_cov`, `clip_cov` it has,
    `losses` those it applies by itself (registered ones that name it in their `LossTraits` come on top; without either,
    it is told elsewhere which), and `loss_keys` those of `dual_clip`, `aggregation` and `is_bounds` that it heeds.
    `all_weights`: it can train without an adapter, as `[model] lora_rank = 0` asks for. `max_staleness` is the largest
    that it can do on some devices, 0 where it samples and trains in turn.
    """

    reports_sync_loss: bool
    preserves_token_advantages: bool
    supports_checkpoint_resume: bool
    checkpoint_resume_mode: CheckpointMode
    determinism: Determinism
    provides_entropy: bool
    regularisers: frozenset[str] = frozenset()
    losses: frozenset[str] = frozenset({"importance_sampling"})
    all_weights: bool = False
    loss_keys: frozenset[str] = frozenset()
    max_staleness: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """What an engine promises; `traits` of its `PluginSpec`. A backend promises no more than its engine does.

    `determinism` says when equal seeds draw equal tokens, `provides_entropy` whether samples carry entropies.
    `honours` names those of `logprobs`, `attention_kernel`, `dtype` and `kv_cache_dtype` in `[inference]` that it
    supports; the others are refused unless they are at their defaults. `open_teacher(context) -> Teacher` opens the
    model of `[teacher]`, once per run; None = the engine gives no log-probabilities of given tokens. With
    `teaches_at_any_temperature` it gives them at a temperature other than 1 as well.
    """

    determinism: Determinism = Determinism.NONE
    provides_entropy: bool = False
    honours: frozenset[str] = frozenset()
    open_teacher: Function | None = None
    teaches_at_any_temperature: bool = False

    def limit(self, capabilities: Capabilities) -> Capabilities:
        """What a backend with these capabilities can promise while it samples with this engine."""
        return replace(
            capabilities,
            determinism=min(capabilities.determinism, self.determinism, key=WEAKEST_FIRST.index),
            provides_entropy=capabilities.provides_entropy and self.provides_entropy,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What an algorithm requires of the sampler, and whether it takes `Completion.rewards_T`.

    As `traits` of a `PluginSpec`, known before anything loads, it says that the factory returns a whole `Algorithm`.
    """

    entropy: bool = False
    token_rewards: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTraits:
    """How a table is read; `traits` of its `PluginSpec`.

    `flag_prefix` precedes each key's name on the command line (`eval_` makes `--eval-every`). `starts_runs` marks a
    table about how runs are started, not about what a run is; a run's records omit it.

    `extends` adds the keys of this model to a table that another plugin owns (`factory=None` adds none); two plugins
    that define one key are an error. `defaults` supplies values for keys whose own default is empty. `legacy_keys` maps
    keys of earlier versions to their present place in the same table (`options.port`): they are refused, with the lines
    to write instead. `defaults` and `legacy_keys` are for extensions only.
    """

    flag_prefix: str = ""
    starts_runs: bool = False
    extends: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    legacy_keys: Mapping[str, str] = field(default_factory=dict)
