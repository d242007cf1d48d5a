"""The rewards that a configuration names, and its shadow, built as a run builds them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from retrain.kernel.config.plugin_tables import ShadowKeys
from retrain.kernel.config.resolved import DEFAULT_ORIGIN, Config, Layer, Origin
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import LoadedData, Reward
from retrain.kernel.plugins.resolve import build_part
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind
from retrain.tasks.scoring.service import NamedReward, ScoringService

LOG = logging.getLogger("retrain")
DEFAULT_REWARD, NO_REWARD = "match", "none"
PARAMS, SHADOW, SHADOW_PARAMS = "reward.params", "reward.shadow", "reward.shadow_params"


def build_service(config: Config, context: PluginContext, data_reward: Reward | None) -> ScoringService:
    """The rewards of a run at work, with its shadow; see `build_rewards`."""
    rewards = build_rewards(config, context, data_reward)
    keys = shadow_keys(config)
    shadow = _build_shadow(keys.shadow, config, context) if keys.shadow else None
    service = ScoringService(rewards, config.scoring, shadow=shadow)
    if shadow is not None and shadow.names == service.names and not keys.shadow_params:
        LOG.warning("%s: %r is what is trained, so the two cannot part", config.place(SHADOW), service.names[0])
    return service


def build_rewards(config: Config, context: PluginContext, data_reward: Reward | None) -> tuple[NamedReward, ...]:
    """The rewards of `reward.weights`, or else the one of `reward.type`.

    `data_reward`, the data source's own verifier, is used when the user set neither, under the source's name.
    """
    if data_reward is not None and not names_a_reward(config):
        return (NamedReward(name=config.data.source, reward=data_reward),)
    weights: Mapping[str, float] = config.reward.weights
    path = "reward.weights" if weights else "reward.type"
    if data_reward is not None:
        LOG.info("%s replaces the verifier that data source %r brings", config.place(path), config.data.source)
    return tuple(
        NamedReward(name=name, reward=_build_reward(name, path, config, context), weight=float(weight))
        for name, weight in (weights or {config.reward.type: 1.0}).items()
    )


def _build_reward(name: str, path: str, config: Config, context: PluginContext) -> Reward:
    reward: Reward = build_part(Kind.REWARD, name, path, context, reward_params(config, name), PARAMS)
    return reward


def reward_params(config: Config, name: str) -> Mapping[str, Any]:
    """The parameters of a reward: `reward.params`, or its table there if `reward.weights` lists rewards by name."""
    given: Mapping[str, Any] = config.reward.params
    own = given.get(name, {}) if config.reward.weights else given
    return own if isinstance(own, Mapping) else {}


def _build_shadow(name: str, config: Config, context: PluginContext) -> ScoringService:
    """The service of `[reward] shadow`: a second verifier that scores every completion, and that nothing trains."""
    own = shadow_config(config)
    reward = _build_reward(name, SHADOW, own, replace(context, config=own))
    return ScoringService((NamedReward(name=name, reward=reward),), config.scoring)


def shadow_keys(config: Config) -> ShadowKeys:
    """The keys of `[reward]` about its shadow; none is named where no plugin registered them."""
    return config.table("reward", ShadowKeys)


def shadow_config(config: Config) -> Config:
    """The configuration as the shadow sees it: `[reward]` with its name as type and `shadow_params`, else defaults.

    pydantic's ValidationError on keys that `[reward]` does not have, or not so.
    """
    keys = shadow_keys(config)
    params = {"type": keys.shadow, **keys.shadow_params}
    table = type(config.tables["reward"]).model_validate(params)
    origins = {path: origin for path, origin in config.origins.items() if not path.startswith("reward.")}
    place = Origin(layer=Layer.FILE, place=f"{config.place(SHADOW_PARAMS)}, as")
    origins |= {f"reward.{key}": place for key in params} | {SHADOW: config.origin(SHADOW)}
    return replace(config, tables={**config.tables, "reward": table}, origins=origins)


def names_a_reward(config: Config) -> bool:
    """Whether the user named rewards, which then replace a source's own verifier."""
    return config.origin("reward.type") != DEFAULT_ORIGIN or bool(config.reward.weights)


def uses_own_verifier(data: LoadedData, config: Config) -> bool:
    """Whether the source's own verifier scores: it brings one, and the user named no other."""
    return data.reward is not None and not names_a_reward(config)


def brings_tasks(config: Config, plugins: Plugins) -> bool:
    """Whether tasks and scoring are those of an environment, and not those of `[data]` and `[reward]`."""
    provider = config.environment.provider
    found = plugins.find(Kind.ENVIRONMENT, provider) if provider else ()
    traits = found[0].spec.traits if found else None
    return bool(provider) and not (isinstance(traits, Mapping) and traits.get("plays_data"))


def has_verifier(config: Config) -> bool:
    """Whether anything judges the completions of a run: not with `[reward] type = "none"`."""
    return bool(config.environment.provider) or NO_REWARD not in (config.reward.weights or {config.reward.type})


def judges(rewards: Sequence[object]) -> bool:
    """Whether the rewards give verdicts together: one that gives none leaves every completion without.

    An environment, which has no rewards here, judges by itself.
    """
    return all(getattr(reward, "gives_verdicts", True) for reward in rewards)


def comparing_rewards(rewards: Sequence[NamedReward]) -> frozenset[str]:
    """Names of the rewards that compare with the reference, so that an empty one would make silence correct."""
    return frozenset(each.name for each in rewards if getattr(each.reward, "needs_reference", False))


def data_reward(config: Config, context: PluginContext) -> Reward | None:
    """The data source's own verifier if a run would use it; loads the source."""
    return None if names_a_reward(config) else load_data(config, context).reward


def load_data(config: Config, context: PluginContext) -> LoadedData:
    """What `[data]` names, read."""
    options = config.data.options
    source = build_part(Kind.DATA_SOURCE, config.data.source, "data.source", context, options, "data.options")
    data: LoadedData = source.load()
    return data
