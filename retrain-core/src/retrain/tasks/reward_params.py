"""Which parameters of `[reward] params` each reward gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrain.kernel.config.resolved import Config

PARAMS = "reward.params"


def reward_params(config: Config, name: str) -> Mapping[str, Any]:
    """The parameters of a reward: `reward.params`, or its table there if `reward.weights` lists rewards by name."""
    given: Mapping[str, Any] = config.value(PARAMS, {})
    own = given.get(name, {}) if config.reward.weights else given
    return own if isinstance(own, Mapping) else {}
