"""Truncated completions and those near the limit: the soft punishment, the masked rows, the dropped verdicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.kernel.informative import GroupStatus, group_status, verdicts
from retrain.kernel.types import Completion, Group
from retrain.rooms.credit.overlong import SoftPunishment, longest_turn, soft_punishment

MakeGroup = Callable[..., Group]


def test_the_vectors_of_the_soft_punishment() -> None:
    lengths, amounts = [80, 85, 90, 100, 101], [0.0, -0.25, -0.5, -1.0, -1.0]
    assert [soft_punishment(length, limit=100, zone=20) for length in lengths] == amounts


@given(limit=st.integers(1, 500), data=st.data())
def test_the_soft_punishment_never_rewards_and_never_takes_more_than_one(limit: int, data: st.DataObject) -> None:
    zone = data.draw(st.integers(1, limit))
    amounts = [soft_punishment(length, limit=limit, zone=zone) for length in range(limit + 3)]
    assert amounts == sorted(amounts, reverse=True)
    assert amounts[: limit - zone + 1] == [0.0] * (limit - zone + 1)
    assert amounts[limit:] == [-1.0] * 3


def test_what_counts_in_an_episode_is_its_longest_turn(make_completion: Callable[..., Completion]) -> None:
    turns = np.array([0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1], dtype=bool)
    plain = make_completion([-1.0] * 12)
    episode = Completion(
        **{name: getattr(plain, name) for name in ("tokens_T", "logprobs_T", "text", "stop_reason", "policy_version")},
        action_T=turns,
    )
    assert (longest_turn(plain), longest_turn(episode)) == (12, 4)
    rewritten = Completion(
        **{name: getattr(plain, name) for name in ("tokens_T", "logprobs_T", "text", "stop_reason", "policy_version")},
        action_T=turns,
        starts=(0, 8),  # a fresh context in the middle of four sampled tokens
    )
    assert longest_turn(rewritten) == 3
    assert longest_turn(make_completion([])) == 0


def test_the_shaper_punishes_the_judged_and_leaves_what_is_raw(
    make_group: MakeGroup, make_completion: Callable[..., Completion]
) -> None:
    lengths = [80, 85, 90, 100, 100]
    group = make_group(1, 1, 0, None, 0, completions=[make_completion([-1.0] * length) for length in lengths])
    (shaped,), fields = SoftPunishment(limit=100, zone=20).shape(3, (group,))
    assert [score.value for score in shaped.scores] == [1.0, 0.75, -0.5, None, -1.0]
    assert verdicts(shaped) == verdicts(group) == [1.0, 1.0, 0.0, 0.0]
    assert shaped.raw_scores == group.scores
    assert fields == {"soft_overlong_mean": pytest.approx(-1.75 / 4), "soft_overlong_count": 3}


def test_lengths_alone_do_not_make_a_group_informative(
    make_group: MakeGroup, make_completion: Callable[..., Completion]
) -> None:
    group = make_group(0, 0, 0, completions=[make_completion([-1.0] * length) for length in (10, 95, 100)])
    (shaped,), _ = SoftPunishment(limit=100, zone=20).shape(0, (group,))
    assert len({score.value for score in shaped.scores}) == 3
    assert group_status(shaped) is GroupStatus.ALL_WRONG


def test_a_zone_longer_than_a_completion_is_refused_with_its_place(load: Any, command: Any, plugins: Any) -> None:
    result = command("explain", "--max-tokens", "16", "--soft-overlong", "17")
    assert result.code == 2
    assert "soft_overlong" in result.err
    assert "17 tokens, but a completion has at most max_tokens = 16" in result.err
    assert command("explain", "--max-tokens", "16", "--soft-overlong", "16").code == 0
