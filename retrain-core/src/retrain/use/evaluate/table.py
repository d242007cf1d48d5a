"""The keys of `[eval.sets.NAME]`."""

from __future__ import annotations

from typing import Any

from retrain.kernel.config.keys import Table, key


class SetKeys(Table):
    """`[eval.sets.NAME]`, beside the keys of `[data]`; an absent key has the run's value."""

    reward: str | dict[str, Any] | None = key(None, "A reward by name, or a table with the keys of [reward].")
    examples: int = key(0, "Examples, drawn by seed; 0 = all.", ge=0)
    samples: int | None = key(None, "Completions per example; with greedy 1.", ge=1)
    temperature: float | None = key(None, "Sampling temperature; above 0.", gt=0.0)
    max_tokens: int | None = key(None, "New tokens per completion at most.", ge=1)
    greedy: bool = key(False, "Always take the most likely token.")
    seed: int | None = key(None, "Seed of the choice of examples and of sampling.", ge=0)
    cluster: str | None = key(None, "As [eval] cluster.")
