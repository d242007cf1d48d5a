"""The rewards that a configuration names, built as a run builds them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.verifier import LoadedData, Reward
from retrain.kernel.plugins.build import build_part
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind
from retrain.tasks.examples import names_a_reward
from retrain.tasks.reward_params import PARAMS, reward_params
from retrain.tasks.scoring.dispatcher import NamedReward

LOG = logging.getLogger("retrain")
DEFAULT_REWARD, NO_REWARD = "match", "none"


def build_rewards(config: Config, context: PluginContext, data_reward: Reward | None) -> tuple[NamedReward, ...]:
    """The rewards of `reward.weights`, or else the one of `reward.type`.

    `data_reward`, the data source's own verifier, is used when the user set neither, under the source's name.
    """
    weights: Mapping[str, float] = config.reward.weights
    if weights:
        path = "reward.weights"
    else:
        path = "reward.type"
        if data_reward is not None and not names_a_reward(config):
            return (NamedReward(name=config.data.source, reward=data_reward),)
        weights = {config.reward.type: 1.0}
    if data_reward is not None:
        LOG.info("%s replaces the verifier that data source %r brings", config.place(path), config.data.source)
    return tuple(
        NamedReward(
            name=name,
            reward=build_part(Kind.REWARD, name, path, context, reward_params(config, name), PARAMS),
            weight=float(weight),
        )
        for name, weight in weights.items()
    )


def brings_tasks(config: Config, plugins: Plugins) -> bool:
    """Whether tasks and scoring are those of an environment, and not those of `[data]` and `[reward]`."""
    provider = config.environment.provider
    found = plugins.find(Kind.ENVIRONMENT, provider) if provider else ()
    traits = found[0].spec.traits if found else None
    return bool(provider) and not (isinstance(traits, Mapping) and traits.get("plays_data"))


def has_verifier(config: Config) -> bool:
    """Whether anything judges the completions of a run: not with `[reward] type = "none"`."""
    weights: Mapping[str, float] = config.reward.weights
    names = list(weights) or [config.reward.type]
    return bool(config.environment.provider) or NO_REWARD not in names


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
    if names_a_reward(config):
        return None
    return verifier_of_source(config, context)


def verifier_of_source(config: Config, context: PluginContext) -> Reward | None:
    """The data source's own verifier, None if it has none; loads the source."""
    return load_data(config, context).reward


def load_data(config: Config, context: PluginContext) -> LoadedData:
    """What `[data]` names, read."""
    options = config.data.options
    source = build_part(Kind.DATA_SOURCE, config.data.source, "data.source", context, options, "data.options")
    data: LoadedData = source.load()
    return data
