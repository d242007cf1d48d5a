"""What a plugin declares about a part before importing it: its kind, a backend's capabilities, how a table is read.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFunctions:
    """A backend's functions that are called while it is not built; `functions` of its `PluginSpec`.

    Each is a function or `"module:function"`, imported when it is called; None = the backend has none.

    `find_devices(config) -> (devices, why) | None`: the devices among `[backend] devices` that this machine has, and
    the reason if the user did not set the key; None = exactly as written. Called before anything loads. ConfigError
    when devices that the user set (see `config.origin`) are missing.

    `estimate_memory(config, model_folder) -> MemoryModel`: called by `capacity`, `explain` and at the start of a run.
    `model_folder()` is a folder with the model's `config.json`, fetched if necessary, and `model_folder(NAME)` one of
    another model. Read headers of weights if needed, import nothing heavy; ConfigError when the sizes cannot be read.

    `evaluate_loss(config, plugins, trial: LossTrial) -> LossValue`: value and gradient of `[algorithm] loss` in
    float64, for the tests of losses.

    `export_model(export: ModelExport) -> ExportedModel | None`: write a model with its adapter merged in, and compare
    its logits. `fetch_adapter(path, config) -> Path | None`: folder with a copy of an adapter stored elsewhere
    (`service://...`). Both are called for every backend until one returns something.

    `models` are the models that the distribution ships: folders by name, such as `builtin:tiny`.
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

    `factory` is the object itself or `"module:attribute"`, imported only when the name is used;
    the hook that registers the kind says what it must be. `params` is the pydantic model of the part's parameters.
    `traits` is what others may read before the factory runs (a backend's `Capabilities`; of a command its
    group in `retrain --help`: train, look, compare, use, extend or tools), and `functions` what they may call.
    """

    name: str
    summary: str
    factory: Callable[..., Any] | object | str
    params: type[BaseModel] | str | None = None
    aliases: tuple[str, ...] = ()
    traits: object | None = None
    functions: BackendFunctions | None = None

    def load(self) -> Any:
        """The factory, imported now if it was given as text."""
        return load_target(self.factory)

    def load_params(self) -> type[BaseModel] | None:
        """The model of the parameters, imported now if it was given as text."""
        model = load_target(self.params)
        return model if model is None or isinstance(model, type) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigClaim:
    """The command that handles a TOML file that is not a training run.

    `command` is a registered command; it gets `FILE [overrides]` as `train` would. `explain` is `"module:function"`,
    `f(arguments, plugins) -> mapping`, which returns what `retrain explain FILE` shows.
    """

    command: str
    explain: str

    def load_explain(self) -> Callable[..., Mapping[str, Any]]:
        """The function, imported now."""
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
    """The object itself, or the one that `"module:attribute"` names, imported now."""
    if not isinstance(target, str):
        return target
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)
