"""The keys of `[reward]` about its shadow."""

from __future__ import annotations

from typing import Any

from retrain.kernel.config.keys import Table, key
from retrain.kernel.types import Kind


class ShadowKeys(Table):
    """A second verifier that is scored and never trained."""

    shadow: str = key(
        "", "A second reward that scores every completion and is never trained; empty = none.", names=Kind.REWARD
    )
    shadow_params: dict[str, Any] = key(
        {}, "Keys of [reward] for the shadow alone; those not given have defaults.", needs="reward.shadow"
    )
