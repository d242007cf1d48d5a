"""What a plugin says of a part before anything of it is imported: its kind, what a backend can, how a table is read.

The standard library is all that this module needs, so that `retrain --help` and completion stay quick.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """Every kind of part that a TOML can name; the value is the word used in messages."""

    ADVANTAGE = "advantage"
    TRANSFORM = "transform"
    UNCERTAINTY = "uncertainty"
    ALGORITHM = "algorithm"
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
    LAUNCHER = "launcher"
    CONFIG_TABLE = "config table"
    COMMAND = "command"
    TEMPLATE = "init template"


class CheckpointMode(StrEnum):
    """What a backend can bring back after a restart."""

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
    """What a backend promises; the kernel refuses configurations that need more, before anything heavy loads."""

    reports_sync_loss: bool
    preserves_token_advantages: bool
    supports_checkpoint_resume: bool
    checkpoint_resume_mode: CheckpointMode
    determinism: Determinism
    provides_entropy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """What an engine promises; `traits` of its `PluginSpec`. A backend promises no more than its engine does.

    `determinism` says when equal seeds draw equal tokens, `provides_entropy` whether samples carry entropies.
    `honours` names which of `logprobs`, `attention_kernel`, `dtype` and `kv_cache_dtype` of `[inference]` it heeds: the
    others are refused with it, unless they stand at their defaults.
    """

    determinism: Determinism = Determinism.NONE
    provides_entropy: bool = False
    honours: frozenset[str] = frozenset()

    def limit(self, capabilities: Capabilities) -> Capabilities:
        """What a backend with these capabilities can promise while it samples with this engine."""
        return replace(
            capabilities,
            determinism=min(capabilities.determinism, self.determinism, key=WEAKEST_FIRST.index),
            provides_entropy=capabilities.provides_entropy and self.provides_entropy,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What an algorithm asks of the sampler, known before anything loads.

    As `traits` of a `PluginSpec` it also says that the factory returns a whole `Algorithm`.
    """

    entropy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTraits:
    """How a table is read; `traits` of its `PluginSpec`.

    `flag_prefix` stands before each key's name on the command line (`eval_` makes `--eval-every`).
    `pending` refuses the whole table, with that text, because the feature is not built yet. `starts_runs` says that
    the table tells how runs are started, not what a run is: it is left out of the records of a run.

    `extends` says that the table belongs to another plugin and gets the keys of this model besides (`factory=None`
    adds none). Two plugins that define one key are an error. `defaults` supplies values for keys whose own default is
    empty. `legacy_keys` maps keys of earlier versions to where they stand now in the same table (`options.port`):
    they are refused, with the lines to write instead. These three concern extensions alone.
    """

    flag_prefix: str = ""
    pending: str = ""
    starts_runs: bool = False
    extends: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    legacy_keys: Mapping[str, str] = field(default_factory=dict)
