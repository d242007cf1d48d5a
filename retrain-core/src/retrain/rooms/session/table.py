"""`[resume]`, and the keys of `[training]` that select what a step trains."""

from __future__ import annotations

from typing import Literal

from retrain.kernel.config.keys import Table, key


class ResumeTable(Table):
    """Continue an earlier run."""

    from_: str = key("", "Run folder to continue (`--resume DIR`).", alias="from", free_on_resume=True)
    anyway: bool = key(
        False, "Continue although configuration, code or data make it a different run.", free_on_resume=True
    )


class SelectionKeys(Table):
    """Keys of `[training]`: which completions of a step count, and how many groups it looks for."""

    overlong: Literal["keep", "mask", "drop"] = key(
        "keep", "Truncated completions: keep, mask (out of the loss) or drop (out of the baseline, too)."
    )
    soft_overlong: int = key(
        0, "Length of the zone below max_tokens in which the reward falls by up to 1; 0 = off.", ge=0
    )
    refill: int = key(0, "Further rounds of prompts, at most, until batch_size groups can teach; 0 = off.", ge=0)
