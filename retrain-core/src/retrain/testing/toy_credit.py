"""A minimal credit flow around the part under test."""

from __future__ import annotations

import numpy as np

from retrain.credit.specs import TransformSpec, UncertaintyContext
from retrain.kernel.types import Floats


def centred(rewards_G: Floats) -> Floats:
    """Reward minus the mean of its group, `[G]`."""
    return rewards_G - np.mean(rewards_G)


def surprisal(ctx: UncertaintyContext) -> Floats:
    """-log p of the sampled token, nats >= 0, `[T]`."""
    return np.maximum(-ctx.logprobs_T, 0.0)


FLAT = TransformSpec(name="flat")
