"""Completions and groups by hand."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from retrain.kernel.types import Completion, Example, Group, Score, StopReason


def completion_of(tokens: Sequence[int] | np.ndarray = (1, 2), text: str = "", *, prompt: int = 0) -> Completion:
    """Return a completion of these tokens, of which the first `prompt` were given; each has surprisal 1."""
    tokens_T = np.asarray(tokens)
    return Completion(
        tokens_T=tokens_T,
        action_T=np.arange(tokens_T.size) >= prompt,
        logprobs_T=np.full(tokens_T.size, -1.0),
        text=text,
        stop_reason=StopReason.EOS,
        policy_version=0,
    )


def group_of(completions: Sequence[Completion], scores: Sequence[Score], name: str = "e", **more: Any) -> Group:
    """Return the group of an example called `name`."""
    example = Example(id=name, prompt=more.pop("prompt", "p"), reference=more.pop("reference", "r"))
    return Group(example=example, completions=tuple(completions), scores=tuple(scores), **more)
