"""Builds the rewards that a configuration names, and its shadow."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from retrain.kernel.config.plugin_tables import ShadowKeys
from retrain.kernel.config.resolved import DEFAULT_ORIGIN, Config
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import LoadedData, Reward
from retrain.kernel.plugins.resolve import build_part
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind
from retrain.tasks.scoring.pool import NamedReward
from retrain.tasks.scoring.service import ScoringService

LOG = logging.getLogger("retrain")
DEFAULT_REWARD, NO_REWARD = "match", "none"
PARAMS = "reward.params"


def build_service(config: Config, context: PluginContext, data_reward: Reward | None) -> ScoringService:
    rewards = build_rewards(config, context, data_reward)
    if not shadow_keys(config).shadow:
        return ScoringService(rewards, config.scoring)
    from retrain.tasks.scoring.shadow import build_shadow

    return ScoringService(rewards, config.scoring, shadow=build_shadow(config, context, rewards))


def build_rewards(config: Config, context: PluginContext, data_reward: Reward | None) -> tuple[NamedReward, ...]:
    """Build the rewards of `reward.weights` or `reward.type`, unless the source's own `data_reward` is to be used."""
    if data_reward is not None and not names_a_reward(config):
        return (NamedReward(name=config.data.source, reward=data_reward),)
    weights: Mapping[str, float] = config.reward.weights
    path = "reward.weights" if weights else "reward.type"
    if data_reward is not None:
        LOG.info("%s replaces the verifier that data source %r brings", config.place(path), config.data.source)
    built = []
    for name, weight in (weights or {config.reward.type: 1.0}).items():
        reward: Reward = build_part(Kind.REWARD, name, path, context, reward_params(config, name), PARAMS)
        built.append(NamedReward(name=name, reward=reward, weight=float(weight)))
    return tuple(built)


def reward_params(config: Config, name: str) -> Mapping[str, Any]:
    given: Mapping[str, Any] = config.reward.params
    own = given.get(name, {}) if config.reward.weights else given
    return own if isinstance(own, Mapping) else {}


def shadow_keys(config: Config) -> ShadowKeys:
    return config.table("reward", ShadowKeys)


def has_shadow(config: Config) -> bool:
    own = (each.get("reward") for each in config.data.tasks)
    return bool(shadow_keys(config).shadow) or any(isinstance(each, Mapping) and each.get("shadow") for each in own)


def names_a_reward(config: Config) -> bool:
    return config.origin("reward.type") != DEFAULT_ORIGIN or bool(config.reward.weights)


def uses_own_verifier(data: LoadedData, config: Config) -> bool:
    return data.reward is not None and not names_a_reward(config)


def brings_tasks(config: Config, plugins: Plugins) -> bool:
    """True if an environment brings tasks and scoring, in place of `[data]` and `[reward]`."""
    provider = config.environment.provider
    found = plugins.find(Kind.ENVIRONMENT, provider) if provider else ()
    traits = found[0].spec.traits if found else None
    return bool(provider) and not (isinstance(traits, Mapping) and traits.get("plays_data"))


def has_verifier(config: Config) -> bool:
    own = any(not each.keys().isdisjoint(("reward", "environment")) for each in config.data.tasks)
    return own or bool(config.environment.provider) or NO_REWARD not in (config.reward.weights or {config.reward.type})


def judges(rewards: Sequence[object]) -> bool:
    """True if the rewards together give verdicts; an environment has no rewards here and judges by itself."""
    return all(getattr(reward, "gives_verdicts", True) for reward in rewards)


def comparing_rewards(rewards: Sequence[NamedReward]) -> frozenset[str]:
    """Return the names of the rewards that compare with the reference: an empty one would make silence correct."""
    return frozenset(each.name for each in rewards if getattr(each.reward, "needs_reference", False))


def data_reward(config: Config, context: PluginContext) -> Reward | None:
    return None if names_a_reward(config) else load_data(config, context).reward


def load_data(config: Config, context: PluginContext) -> LoadedData:
    options = config.data.options
    source = build_part(Kind.DATA_SOURCE, config.data.source, "data.source", context, options, "data.options")
    data: LoadedData = source.load()
    return data
