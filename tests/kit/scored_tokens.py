"""The action tokens of a pack with given numbers, as a torch loss sees them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What a `Pack` holds for the loss."""

    behaviour_logprobs_M: Tensor
    engine_logprobs_M: Tensor
    advantages_M: Tensor
    sequences_M: Tensor
    rows: tuple[int, ...]


def scored(old: Any, credit: Any, sequences: Any = None, engine: Any = None) -> Scored:
    """Tokens of the sequences with these indices, or of one; the engine's log-probabilities are the old ones."""
    old_M = torch.as_tensor(old)
    sequences_M = torch.zeros(len(old_M), dtype=torch.int64) if sequences is None else torch.as_tensor(sequences)
    return Scored(
        behaviour_logprobs_M=old_M,
        engine_logprobs_M=old_M if engine is None else torch.as_tensor(engine),
        advantages_M=torch.as_tensor(credit),
        sequences_M=sequences_M,
        rows=tuple(range(int(sequences_M.max()) + 1)),
    )
