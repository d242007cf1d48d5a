"""Credit by turn: the shared vectors, one turn against credit by episode, groups whose scores are all equal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.advantages import Turns, compute_composable_advantages
from retrain.api import Completion, Config, Example, Group, Score, StopReason, load_plugins
from retrain.credit.algorithm import CreditAlgorithm, train_rows
from retrain.credit.flow import build_flow
from retrain.kernel.config.schema import AlgorithmTable
from retrain_sepa.turns import gigpo_advantages, turn_return_advantages

VECTORS = json.loads((Path(__file__).parents[1] / "turns_and_self_distillation.json").read_text("utf-8"))["turns"]
REWARDS = [np.array(rewards, dtype=np.float64) for rewards in VECTORS["rewards"]]


def of_episodes(name: str, turns_G: list[Turns], rewards_G: list[float], **params: Any) -> list[list[float]]:
    """The token advantages of a group, through the configured flow."""
    found = compute_composable_advantages(
        rewards_G,
        [np.full(sum(turns.lengths), -1.0) for turns in turns_G],
        advantage_mode=name,
        transform_mode="none",
        advantage_params=params,
        turns_G=turns_G,
    )
    return [advs_T.tolist() for advs_T in found.token_advs]


@pytest.mark.parametrize(
    ("scale", "name"), [("", "gigpo, gamma 0.95, omega 1, mean only"), ("std", "gigpo, with group std")]
)
def test_gigpo_has_the_shared_vectors(scale: str, name: str) -> None:
    found = gigpo_advantages(REWARDS, VECTORS["states"], scale=scale)
    assert np.concatenate(found) == pytest.approx(VECTORS[name], abs=1e-9 if not scale else 1e-8)


def test_a_turn_is_compared_with_the_same_turn_of_other_episodes() -> None:
    found = turn_return_advantages(REWARDS, gamma=0.5)
    # returns 0.25 0.5 1; 0 0; 0.5 1: means 0.25 and 0.5, and only one episode has a third turn
    assert [advs.tolist() for advs in found] == [[0.0, 0.0, 0.0], [-0.25, -0.5], [0.25, 0.5]]


@pytest.mark.parametrize("name", ["turn_return", "gigpo"])
@pytest.mark.parametrize("rewards_G", [[1.0, 0.0, 0.0, 0.3], [0.1, 0.1, 0.1], [0.7, -0.2]])
def test_one_turn_gets_the_advantage_of_the_episode(name: str, rewards_G: list[float]) -> None:
    turns_G = [Turns(lengths=(n + 1,), rewards=(r,), states=("s",)) for n, r in enumerate(rewards_G)]
    episode = of_episodes("grpo", turns_G, rewards_G)
    assert of_episodes(name, turns_G, rewards_G) == episode
    alone = [Turns(lengths=turns.lengths) for turns in turns_G]
    assert of_episodes(name, alone, rewards_G) == episode


def test_all_tokens_of_a_turn_share_its_advantage_and_the_rest_of_the_score_is_the_last_turns() -> None:
    turns_G = [Turns(lengths=(2, 1), rewards=(0.25,)), Turns(lengths=(1, 3))]
    found = of_episodes("turn_return", turns_G, [1.0, 0.0])
    assert found == [[0.5, 0.5, 0.375], [-0.5, -0.375, -0.375, -0.375]]
    assert Turns(lengths=(1, 1), rewards=(1.0, 2.0, 5.0)).rewards_of(8.0).tolist() == [1.0, 7.0]
    assert Turns(lengths=()).rewards_of(8.0).tolist() == []


def test_unknown_states_and_states_seen_once_add_nothing() -> None:
    turns_G = [Turns(lengths=(1, 1), states=("", "a")), Turns(lengths=(1, 1), states=("", "b"))]
    assert of_episodes("gigpo", turns_G, [1.0, 0.0]) == [[0.5, 0.5], [-0.5, -0.5]]


def episode(turns: Turns, tools: int = 2) -> Completion:
    """A prompt of two tokens, and after each turn the tokens of a tool."""
    action = [False, False]
    for length in turns.lengths:
        action += [True] * length + [False] * tools
    count = len(action)
    return Completion(
        tokens_T=np.arange(count),
        action_T=np.array(action),
        logprobs_T=np.full(count, -1.0),
        text="",
        stop_reason=StopReason.EOS,
        policy_version=0,
        turns=len(turns.lengths),
        by_turn=turns,
    )


def algorithm(name: str) -> CreditAlgorithm:
    table = AlgorithmTable(advantage_mode=name, transform_mode="none", uncertainty_kind="surprisal")
    return CreditAlgorithm(flow=build_flow(Config(tables={"algorithm": table}), load_plugins({})))


def group_of(*pairs: tuple[Turns, float]) -> Group:
    return Group(
        example=Example(id="a", prompt="a", reference=""),
        completions=tuple(episode(turns) for turns, _ in pairs),
        scores=tuple(Score.of(score) for _, score in pairs),
    )


def test_a_group_of_equal_scores_is_trained_where_its_turns_differ() -> None:
    early, late = Turns(lengths=(1, 2), rewards=(1.0, 0.0)), Turns(lengths=(2, 1), rewards=(0.0, 1.0))
    credit = algorithm("turn_return").assign(0, [group_of((early, 1.0), (late, 1.0))])
    assert [row.advantages_T[row.action_T].tolist() for row in credit.rows] == [[0.0, -0.5, -0.5], [0.0, 0.0, 0.5]]
    assert not any(row.advantages_T[~row.action_T].any() for row in credit.rows)
    equal = group_of((early, 1.0), (early, 1.0))
    assert algorithm("turn_return").assign(0, [equal]).rows == ()


def test_rows_number_the_turns_of_their_tokens_also_where_an_episode_began_again() -> None:
    done = replace(episode(Turns(lengths=(1, 2))), starts=(0, 4))
    rows = train_rows(done, np.zeros(3))
    assert [row.turns_T[row.action_T].tolist() for row in rows] == [[0], [1, 1]]
    assert train_rows(replace(done, by_turn=None, starts=(0,)), np.zeros(3))[0].turns_T is None
