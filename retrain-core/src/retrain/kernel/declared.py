"""Declarations that a plugin makes when it registers: parts, capabilities, tables, commands, metrics.

This module needs only the standard library, so that `retrain --help` and completion stay fast.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import BaseModel

# A text is "module:function", imported when it is called.
Function = Callable[..., Any] | str
# Default of [scoring] correct_above. It is here because the types of a step import no configuration.
CORRECT_ABOVE = 0.5


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
    """State that a backend restores after a restart: all of it, the adapter, or nothing."""

    EXACT = "exact"
    ADAPTER_ONLY = "adapter_only"
    UNSUPPORTED = "unsupported"


class Determinism(StrEnum):
    """When the same seed gives the same run."""

    EXACT = "exact"
    SAME_MACHINE = "same_machine"
    NONE = "none"


# An explicit order, because a StrEnum compares by spelling.
WEAKEST_FIRST = (Determinism.NONE, Determinism.SAME_MACHINE, Determinism.EXACT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Capabilities of a backend; configurations that need more are refused before anything heavy loads.

    `regularisers` are the supported ones of `kl_reward` (`reference_logprobs`), `kl_loss`, `entropy`, `kl_cov`,
    `clip_cov` and `distil`. `losses` are built into the backend; registered losses that name it in their `LossTraits`
    come on top, and without either the loss is chosen outside retrain. `loss_keys` are the supported ones of
    `dual_clip`, `aggregation`, `is_bounds`, `off_policy_mask` and `level`. `all_weights`: it can train without an
    adapter (`[model] lora_rank = 0`). `max_staleness` is the largest on any devices; 0 = it samples and trains in turn.
    `provides_squared_probs`: it has the method `squared_probs`.
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
    provides_squared_probs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """Capabilities of an engine, `traits` of its `PluginSpec`; they limit the backend that samples with it.

    `determinism` says when equal seeds draw equal tokens, `provides_entropy` that samples carry entropies. `honours`
    are the supported ones of `logprobs`, `attention_kernel`, `dtype` and `kv_cache_dtype` in `[inference]`; the others
    are refused unless they are at their defaults. `open_teacher(context) -> Teacher` opens the model of `[teacher]`,
    once per run; None = no log-probabilities of given tokens. `teaches_at_any_temperature`: not only at 1.
    """

    determinism: Determinism = Determinism.NONE
    provides_entropy: bool = False
    honours: frozenset[str] = frozenset()
    open_teacher: Function | None = None
    teaches_at_any_temperature: bool = False

    def limit(self, capabilities: Capabilities) -> Capabilities:
        """Capabilities of a backend while it samples with this engine."""
        return replace(
            capabilities,
            determinism=min(capabilities.determinism, self.determinism, key=WEAKEST_FIRST.index),
            provides_entropy=capabilities.provides_entropy and self.provides_entropy,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Requirements of an algorithm: sampled entropies, `Completion.rewards_T`, `Group.greedy`, and
    `Completion.squared_probs_T` from the trainer.

    As `traits` of a `PluginSpec`, known before anything loads, it says that the factory returns a whole `Algorithm`.
    """

    entropy: bool = False
    token_rewards: bool = False
    greedy: bool = False
    squared_probs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTraits:
    """Options of a table, `traits` of its `PluginSpec`.

    `flag_prefix` precedes each key's name on the command line (`eval_` makes `--eval-every`). `starts_runs` marks a
    table about starting runs, omitted from a run's records.

    `extends` adds the keys of this model to a table that another plugin owns (`factory=None` adds none); two plugins
    that define one key are an error. For extensions only: `defaults` supplies values for keys whose own default is
    empty; `legacy_keys` maps keys of earlier versions to their present place in the table (`options.port`): they are
    refused, with the lines to write instead.
    """

    flag_prefix: str = ""
    starts_runs: bool = False
    extends: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    legacy_keys: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFunctions:
    """Functions of a backend that are called while it is not built; `functions` of its `PluginSpec`.

    Each is a function or `"module:function"`, imported when it is called; None = not supported.

    `find_devices(config) -> (devices, why) | None`: the devices among `[backend] devices` that this machine has, and
    the reason if the user did not set the key; None = exactly as written. Called before anything loads. ConfigError
    when devices that the user set (see `config.origin`) are missing.

    `estimate_memory(config, model_folder) -> MemoryModel`: called by `capacity`, `explain` and at the start of a run.
    `model_folder()` is a folder with the model's `config.json`, fetched if necessary, and `model_folder(NAME)` one of
    another model. Read headers of weights if needed, import nothing heavy; ConfigError when the sizes cannot be read.

    `evaluate_loss(config, plugins, trial: LossTrial) -> LossValue`: value and gradient of `[algorithm] loss` in
    float64, for the tests of losses.

    `export_model(export: ModelExport) -> ExportedModel | None`: write a model with its adapter merged in, and compare
    its logits. `fetch_adapter(path, config) -> Path | None`: folder with a copy of a remote adapter (`service://...`).
    Both are called for every backend until one returns something.

    `models` are the folders of the models that the distribution ships, by name (`builtin:tiny`).
    """

    find_devices: Function | None = None
    estimate_memory: Function | None = None
    evaluate_loss: Function | None = None
    export_model: Function | None = None
    fetch_adapter: Function | None = None
    models: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSpec:
    """One registered part.

    `factory` is the object or `"module:attribute"`, imported only when the name is used; its form depends on the hook
    that registers the kind. `params` is the pydantic model of the part's parameters. `traits` can be read before the
    factory runs (a backend's `Capabilities`; a command's group in `retrain --help`: train, look, compare, use, extend
    or tools), and `functions` called.
    """

    name: str
    summary: str
    factory: Callable[..., Any] | object | str
    params: type[BaseModel] | str | None = None
    aliases: tuple[str, ...] = ()
    traits: object | None = None
    functions: BackendFunctions | None = None

    def load(self) -> Any:
        return load_target(self.factory)

    def load_params(self) -> type[BaseModel] | None:
        model = load_target(self.params)
        return model if model is None or isinstance(model, type) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigClaim:
    """The command that handles a TOML file that is not a training run.

    `command` is a registered command; it gets `FILE [overrides]` as `train` would. `explain` is `"module:function"`,
    `f(arguments, plugins) -> mapping`, the rows of `retrain explain FILE`.
    """

    command: str
    explain: str

    def load_explain(self) -> Callable[..., Mapping[str, Any]]:
        function: Callable[..., Mapping[str, Any]] = load_target(self.explain)
        return function


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """A field of `metrics.jsonl`, explained.

    `name` may hold `{...}` where names vary (`eval_pass_at_{k}`). `unit` is empty for a plain number, `text`, `flag`,
    `list`, or a unit. `absent` says when a line lacks the field; empty = never.
    """

    name: str
    meaning: str
    unit: str = ""
    absent: str = ""


def load_target(target: object) -> Any:
    """Return the object itself, or import the one that `"module:attribute"` names."""
    if not isinstance(target, str):
        return target
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)
