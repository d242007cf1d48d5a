"""The shadow of a run: a second verifier that scores every completion, and that nothing trains."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from retrain.kernel.config.plugin_tables import ShadowKeys
from retrain.kernel.config.resolved import Config, Layer, Origin
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.declared import Kind
from retrain.kernel.plugins.resolve import build_part
from retrain.tasks.scoring.pool import NamedReward
from retrain.tasks.scoring.service import ScoringService

LOG = logging.getLogger("retrain")
SHADOW, SHADOW_PARAMS = "reward.shadow", "reward.shadow_params"


def build_shadow(config: Config, context: PluginContext, trained: Sequence[NamedReward]) -> ScoringService:
    """Build the service of `[reward] shadow`; a warning if it is the one reward that is trained."""
    keys, own = config.table("reward", ShadowKeys), shadow_config(config)
    reward = build_part(
        Kind.REWARD, keys.shadow, SHADOW, replace(context, config=own), own.reward.params, "reward.params"
    )
    if [each.name for each in trained] == [keys.shadow] and not keys.shadow_params:
        LOG.warning("%s: %r is the trained reward, so the two cannot differ", config.place(SHADOW), keys.shadow)
    return ScoringService((NamedReward(name=keys.shadow, reward=reward),), config.scoring)


def shadow_config(config: Config) -> Config:
    """Return the configuration with the shadow's table as `[reward]`; pydantic's ValidationError on unknown keys."""
    keys = config.table("reward", ShadowKeys)
    params = {"type": keys.shadow, **keys.shadow_params}
    table = type(config.tables["reward"]).model_validate(params)
    origins = {path: origin for path, origin in config.origins.items() if not path.startswith("reward.")}
    place = Origin(layer=Layer.FILE, place=f"{config.place(SHADOW_PARAMS)}, as")
    origins |= {f"reward.{key}": place for key in params} | {SHADOW: config.origin(SHADOW)}
    return replace(config, tables={**config.tables, "reward": table}, origins=origins)
