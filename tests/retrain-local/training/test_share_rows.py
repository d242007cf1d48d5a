from __future__ import annotations

import numpy as np
import pytest

from retrain.api import TrainRow
from retrain_local.training.packs import share_rows


def row(prompt: int, actions: int, first: int = 0) -> TrainRow:
    """A prompt that begins with the token `first`, and so many sampled tokens."""
    tokens_T = np.zeros(prompt + actions, dtype=np.int64)
    tokens_T[0] = first
    action_T = np.arange(prompt + actions) >= prompt
    return TrainRow(
        tokens_T=tokens_T, action_T=action_T, logprobs_T=np.zeros(len(tokens_T)), advantages_T=np.zeros(len(tokens_T))
    )


def cost(rows: list[TrainRow], share: list[int]) -> int:
    """Tokens that a rank computes: every prompt once."""
    prompts = {rows[n].tokens_T[: int(np.argmax(rows[n].action_T))].tobytes() for n in share}
    return sum(len(p) // 8 for p in prompts) + sum(int(rows[n].action_T.sum()) for n in share)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_every_row_is_computed_once_and_tokens_are_balanced(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [
        row(int(prompt), int(actions), first=group)
        for group, prompt in enumerate(rng.integers(5, 40, 12))
        for actions in rng.integers(1, 60, rng.integers(1, 9))
    ]
    shares = share_rows(rows, size)
    assert sorted(n for share in shares for n in share) == list(range(len(rows)))
    costs = [cost(rows, share) for share in shares]
    longest = max(len(each.tokens_T) for each in rows)
    assert max(costs) <= sum(costs) / size + longest


def test_a_prompt_stays_on_one_rank_where_that_is_even() -> None:
    rows = [row(30, 10, first=group) for group in (0, 1) for _ in range(4)]
    assert sorted(map(sorted, share_rows(rows, 2))) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_ranks_beyond_the_rows_have_none() -> None:
    assert share_rows([row(3, 2)], 3) == [[0], [], []]


def test_rows_without_an_action_are_nobodys() -> None:
    assert share_rows([row(3, 0), row(3, 2)], 2) == [[1], []]
    assert share_rows([], 2) == [[], []]
