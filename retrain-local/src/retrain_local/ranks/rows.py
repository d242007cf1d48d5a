"""Shares of a step's rows, one per rank, with about the same number of tokens to compute in each."""

from __future__ import annotations

from collections.abc import Sequence

from retrain.api import TrainRow
from retrain_local.training.packs import cut_groups, grouped_rows


def share_rows(rows: Sequence[TrainRow], size: int) -> list[list[int]]:
    """The indices of each rank's rows, which depends on the rows alone.

    Rows of one prompt stay together as far as that allows, since whoever computes one of them computes the prompt. The
    largest share is as small as that order permits; with fewer rows than ranks some shares are empty. Rows without an
    action are in none.
    """
    groups = grouped_rows(rows)
    low, high = 0, sum(member.last for members in groups for member in members) + 1
    while high - low > 1:  # the largest share is above `low` and at most `high`
        middle = (low + high) // 2
        low, high = (low, middle) if sum(1 for _ in cut_groups(groups, middle)) <= size else (middle, high)
    cuts = [[member.number for group in cut for member in group] for cut in cut_groups(groups, high)]
    return cuts + [[] for _ in range(size - len(cuts))]
