"""The sampler `thompson`; what every sampler must do is in `retrain.testing`, which it passes."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from retrain.api import Example, GroupOutcome, PromptChoice, PromptRequest, Seeds
from retrain.kernel.config.plugin_tables import EnvironmentTable, RewardTable
from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import DataTable
from retrain.run import retrain_check_config
from retrain.run.samplers import thompson

POOL, COUNT, GROUP = 90, 8, 8
RATES = (0.0, 0.5, 1.0)  # of example n: a third impossible, a third that teaches, a third trivial
EXAMPLES = tuple(Example(id=f"e{n}", prompt="p", reference="r") for n in range(POOL))
BY_RATE = {"moves_by": "rate"}


def make(size: int = POOL, seed: int = 0, **params: float) -> thompson.Thompson:
    context: Any = SimpleNamespace(
        params=thompson.Params(**params),
        seeds=Seeds(seed),
        config=SimpleNamespace(training=SimpleNamespace(group_size=GROUP)),
    )
    return thompson.Thompson(context, EXAMPLES[:size])


def outcomes(chosen: list[PromptChoice], rng: np.random.Generator) -> list[GroupOutcome]:
    rights = [int(rng.binomial(GROUP, RATES[int(choice.example_id[1:]) % 3])) for choice in chosen]
    return [
        GroupOutcome(example_id=choice.example_id, correct=right, judged=GROUP, is_informative=0 < right < GROUP)
        for choice, right in zip(chosen, rights, strict=True)
    ]


def run(steps: int, *, seed: int = 0, **params: float) -> tuple[list[PromptChoice], list[bool]]:
    """Every choice of a run, and whether its group taught."""
    sampler, rng = make(seed=seed, **params), np.random.default_rng(seed)
    chosen, taught = list[PromptChoice](), list[bool]()
    for step in range(steps):
        found = sampler.choose(PromptRequest(step=step, cursor=step * COUNT, count=COUNT))
        became = outcomes(found, rng)
        sampler.observe(step, became)
        chosen += found
        taught += [each.is_informative for each in became]
    return chosen, taught


def test_it_draws_what_teaches_and_forecasts_how_often() -> None:
    """By chance 0.33 of the groups teach; at most 0.9 + 0.1 / 3 = 0.93 do with a tenth that is uniform."""
    chosen, taught = run(60)
    late = slice(COUNT * 30, None)
    assert np.mean(taught[late]) > 0.75  # measured over 8 seeds: 0.81 to 0.87
    chances = [choice.chance for choice in chosen[late] if choice.chance is not None]
    assert abs(np.mean(chances) - np.mean(taught[late])) < 0.1


@pytest.mark.parametrize("explore", [0.0, 0.1, 1.0])
def test_the_stated_share_is_drawn_from_all_alike(explore: float) -> None:
    chosen, _ = run(60, explore=explore)
    explored = [choice.example_id for choice in chosen if choice.is_uniform]
    assert abs(len(explored) - explore * 60 * COUNT) < 12  # 48 of 480; the standard deviation is 3.1
    kinds = Counter(int(each[1:]) % 3 for each in explored)
    assert all(abs(kinds[kind] - len(explored) / 3) < 4 * (len(explored) * 2 / 9) ** 0.5 for kind in kinds)


def test_what_it_never_saw_is_forecast_as_what_it_saw() -> None:
    """After a hundred groups that were all wrong, a prompt that nobody tried is expected to be wrong too."""
    sampler = make()
    before = sampler.choose(PromptRequest(step=0, cursor=0, count=1))[0].chance
    all_wrong = [GroupOutcome(example_id=f"e{n}", correct=0, judged=GROUP, is_informative=False) for n in range(80)]
    sampler.observe(0, all_wrong)
    seen = frozenset(each.example_id for each in all_wrong)
    after = sampler.choose(PromptRequest(step=1, cursor=1, count=1, taken=seen))[0].chance
    assert before is not None
    assert after is not None
    assert after < before / 4


def test_evidence_fades_so_that_a_prompt_is_tried_again() -> None:
    """What was all wrong long ago is drawn again, though only the draws of its posterior bring it back."""
    sampler = make(size=6, explore=0.0, decay=0.5)
    for step in range(4):
        seen = [(f"e{n}", 4 * (n > 2)) for n in range(6)]
        sampler.observe(
            step, [GroupOutcome(example_id=n, correct=c, judged=GROUP, is_informative=c > 0) for n, c in seen]
        )
    for step, is_tried in ((4, False), (40, True)):
        requests = (PromptRequest(step=step, cursor=cursor, count=2) for cursor in range(40))
        drawn = {choice.example_id for request in requests for choice in sampler.choose(request)}
        assert bool(drawn & {"e0", "e1", "e2"}) is is_tried


@pytest.mark.parametrize(
    ("tables", "problems"),
    [
        ({"data": {"sampler": "thompson"}, "reward": {"type": "none"}}, 1),
        ({"data": {"sampler": "replay"}, "reward": {"type": "match", "weights": {"none": 1.0}}}, 1),
        ({"data": {"sampler": "thompson"}, "reward": {"type": "match", "weights": {"none": 1.0, "match": 1.0}}}, 0),
        ({"data": {"sampler": "thompson"}, "reward": {"type": "none"}, "environment": {"provider": "agent"}}, 0),
        ({"data": {"sampler": "uniform"}, "reward": {"type": "none"}}, 0),
        ({"data": {"sampler": "curriculum"}, "reward": {"type": "none"}}, 0),
        ({"data": {"sampler": "curriculum", "sampler_params": BY_RATE}, "reward": {"type": "none"}}, 1),
        ({"data": {"sampler": "thompson"}}, 0),
    ],
)
def test_a_sampler_that_goes_by_verdicts_is_refused_where_there_are_none(tables: dict[str, Any], problems: int) -> None:
    models = {"data": DataTable, "reward": RewardTable, "environment": EnvironmentTable}
    config = Config(tables={name: models[name](**keys) for name, keys in tables.items()})
    assert [each.code for each in retrain_check_config(config)] == ["reward.judges-nothing"] * problems
