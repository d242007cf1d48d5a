"""`[reward] shadow`: a second verifier that scores every completion, and that nothing trains."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from retrain.kernel.config.resolved import Config, Layer, Origin
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.verifier import Reward
from retrain.kernel.plugins.build import build_part
from retrain.kernel.types import Kind
from retrain.tasks.reward_params import PARAMS as REWARD_PARAMS
from retrain.tasks.reward_params import reward_params
from retrain.tasks.scoring.build import build_rewards
from retrain.tasks.scoring.dispatcher import NamedReward
from retrain.tasks.scoring.service import ScoringService

LOG = logging.getLogger("retrain")
NAME, PARAMS = "reward.shadow", "reward.shadow_params"


def build_service(config: Config, context: PluginContext, data_reward: Reward | None) -> ScoringService:
    """The rewards of a run at work, with its shadow; see `build_rewards`."""
    rewards = build_rewards(config, context, data_reward)
    service = ScoringService(rewards, config.scoring, shadow=build_shadow(config, context))
    if service.shadow is not None and service.shadow.names == service.names and not shadow_params(config):
        LOG.warning("%s: %r is what is trained, so the two cannot part", config.place(NAME), service.names[0])
    return service


def build_shadow(config: Config, context: PluginContext) -> ScoringService | None:
    """The service of `[reward] shadow`, None without one."""
    name = shadow_name(config)
    if not name:
        return None
    own = shadow_config(config)
    reward = build_part(Kind.REWARD, name, NAME, replace(context, config=own), reward_params(own, name), REWARD_PARAMS)
    return ScoringService((NamedReward(name=name, reward=reward),), config.scoring)


def shadow_name(config: Config) -> str:
    """The reward that `[reward] shadow` names; empty without one."""
    name: str = config.value(NAME, "")
    return name


def shadow_params(config: Config) -> Mapping[str, Any]:
    """The keys of `[reward]` as the shadow has them."""
    params: Mapping[str, Any] = config.value(PARAMS, {})
    return params


def shadow_config(config: Config) -> Config:
    """The configuration as the shadow sees it: `[reward]` with its name as type and `shadow_params`, else defaults.

    pydantic's ValidationError on keys that `[reward]` does not have, or not so.
    """
    params = {"type": shadow_name(config), **shadow_params(config)}
    table = type(config.tables["reward"]).model_validate(params)
    origins = {path: origin for path, origin in config.origins.items() if not path.startswith("reward.")}
    place = Origin(layer=Layer.FILE, place=f"{config.place(PARAMS)}, as")
    origins |= {f"reward.{key}": place for key in params} | {NAME: config.origin(NAME)}
    return replace(config, tables={**config.tables, "reward": table}, origins=origins)
