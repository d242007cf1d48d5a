"""The keys that `[algorithm]` gets for advantages."""

from __future__ import annotations

from retrain.kernel.config.keys import Table, key


class AdvantageKeys(Table):
    """What becomes of the advantages of a step, whichever part computed them."""

    batch_norm: bool = key(
        False, "Then (A - mean) / (std + 1e-8) over all judged completions of the step.", needs="advantage"
    )
    advantage_clip: float = key(
        0.0, "Then advantages between -advantage_clip and advantage_clip; 0 = off.", ge=0.0, needs="advantage"
    )
