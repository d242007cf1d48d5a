"""What a number of seeds can reach, held against the tests that decide; and what is said before the first run."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.campaign.load import PlanTable, seal_plan
from retrain.records.runs.curves import Direction
from retrain.records.runs.registered import Spend
from retrain.verdicts.stats.flip import EXACT_EXCHANGES, FlipTest
from retrain.verdicts.stats.sequential import AnytimeTest, SequentialFlip
from retrain.verdicts.study.comparison import Design, Verdict
from retrain.verdicts.study.judge import judge
from retrain.verdicts.study.looks import reach_of, reach_sentences
from tests.kit.made_runs import WRITTEN, write_campaign
from tests.kit.pairings import pairing

FIXED, UNPAIRED, PLANNED, ANYTIME = Design.FIXED, Design.UNPAIRED, Design.PLANNED, Design.ANYTIME


def clearest(design: Design, seeds: int, comparisons: int, alpha: float, looks: tuple[int, ...]) -> bool:
    """True if a family of clear differences, equal in all seeds, is found at all."""

    def tested(_: object, diffs_N: np.ndarray) -> AnytimeTest | SequentialFlip:
        if design is ANYTIME:
            return AnytimeTest(diffs_N=diffs_N)
        shares = [look / looks[-1] for look in looks]
        return SequentialFlip(diffs_N=diffs_N, counts_K=looks, shares_K=shares, n_max=looks[-1], spend=Spend.POCOCK)

    test_of = tested if design in (ANYTIME, PLANNED) else None
    pair = pairing(np.ones(seeds), test_of=test_of, is_paired=design is not UNPAIRED)
    found = judge([pair] * comparisons, alpha=alpha, direction=Direction.HIGHER)
    return all(each.verdict is Verdict.BETTER for each in found)


@given(st.sampled_from([FIXED, UNPAIRED, ANYTIME, PLANNED]), st.integers(2, 13), st.integers(1, 8))
@settings(max_examples=40)
def test_a_plan_can_decide_exactly_if_the_clearest_result_is_a_verdict(design: Design, seeds: int, family: int) -> None:
    for alpha in (0.05, 0.01):
        looks = (max(1, seeds // 2), seeds) if design is PLANNED else ()
        reach = reach_of(design, num_seeds=seeds, comparisons=family, alpha=alpha, looks=looks)
        assert reach.can_decide == clearest(design, seeds, family, alpha, looks)
        assert reach.can_decide == (seeds >= reach.fewest_seeds)
        assert bool(reach_sentences(reach)) == (not reach.can_decide or bool(reach.idle_looks))


@pytest.mark.parametrize(
    ("design", "seeds", "family", "looks", "said"),
    [
        (FIXED, 3, 1, (), ["smallest possible p 0.25", "plan at least 6"]),
        (FIXED, 6, 4, (), ["0.031 (0.12 after Holm", "plan at least 8", 'test = "unpaired"']),
        (ANYTIME, 6, 1, (), ["plan at least 7"]),
        (UNPAIRED, 3, 1, (), ["smallest possible p 0.1;", "plan at least 4"]),
        (PLANNED, 4, 1, (3, 4), ["plan at least 6"]),
        (PLANNED, 20, 4, (7, 9, 20), ["the look after 7 seeds", "after 9 or more"]),
    ],
)
def test_the_warning_says_what_would_reach_a_verdict(
    design: Design, seeds: int, family: int, looks: tuple[int, ...], said: list[str]
) -> None:
    [line] = reach_sentences(reach_of(design, num_seeds=seeds, comparisons=family, alpha=0.05, looks=looks))
    assert all(part in line for part in said), line


@settings(max_examples=40)
@given(st.integers(2, 5), st.data())
def test_the_unpaired_test_counts_every_deal(size: int, data: st.DataObject) -> None:
    values = st.lists(st.integers(-20, 20), min_size=size, max_size=size)
    left_N, right_N = (np.array(data.draw(values), dtype=float) / 8 for _ in range(2))
    both, observed = np.concatenate([left_N, right_N]), abs(right_N.mean() - left_N.mean())
    deals = [both[list(chosen)].sum() for chosen in combinations(range(2 * size), size)]
    far = sum(abs(both.sum() - 2 * each) / size >= observed - 1e-12 for each in deals)
    test = FlipTest.of_exchanges(left_N, right_N)
    assert test.p == pytest.approx(far / len(deals))
    low, high = test.interval(0.9)
    assert (low <= 0.0 <= high) == (test.p > 0.1)


def test_drawn_deals_agree_with_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    left_N, right_N = rng.normal(size=EXACT_EXCHANGES), rng.normal(0.8, size=EXACT_EXCHANGES)
    exact = FlipTest.of_exchanges(left_N, right_N)
    more_N, right_more_N = np.append(left_N, 0.0), np.append(right_N, 0.8)
    drawn, repeated = (FlipTest.of_exchanges(more_N, right_more_N) for _ in range(2))
    assert drawn.p == repeated.p
    assert drawn.p == pytest.approx(exact.p, abs=0.03)
    assert drawn.interval(0.95) == pytest.approx(exact.interval(0.95), abs=0.2)
    few = FlipTest.of_exchanges(left_N[:3], right_N[:3])
    monkeypatch.setattr("retrain.verdicts.stats.flip.EXACT_EXCHANGES", 1)
    again = FlipTest.of_exchanges(left_N[:3], right_N[:3], patterns=4_000)  # a tenth of them are the observed deal
    assert again.p == pytest.approx(few.p, abs=0.05)
    assert again.interval(0.95) == few.interval(0.95) == (-np.inf, np.inf)
    assert again.interval(0.75) == pytest.approx(few.interval(0.75))


def test_three_seeds_give_an_estimate_and_no_verdict(tmp_path: Path, compare: Any, compare_json: Any) -> None:
    folder = write_campaign(
        tmp_path / "c", {"a+none": 0.0, "b+none": 0.2}, seeds=range(3), steps=20, example_spread=1.0
    )
    said, data = compare(folder).out, compare_json(folder)
    [found] = data["comparisons"]
    assert found["verdict"] == "cannot tell"
    low, high = found["few_seeds"]["interval"]
    assert low < found["difference"] < high
    assert found["few_seeds"]["is_of_examples"]
    assert data["answer"] == said.splitlines()[0]
    for part in ("too few seeds for a verdict (3; 6 are the fewest)", "Better in 3 of 3", "likely between", "normal"):
        assert part in data["answer"]
    assert "at least 6 other seeds" in said
    assert "7 in all" in said


def test_an_unfinished_campaign_is_warned_of_before_its_last_seed(tmp_path: Path, compare: Any) -> None:
    states = {("b+none", 2): "running", ("b+none", 1): "running"}
    effects = {"a+none": 0.0, "b+none": 0.2}
    folder = write_campaign(tmp_path / "c", effects, seeds=range(3), steps=20, states=states)
    assert "no verdict is possible. 3 seeds: smallest possible p 0.25; plan at least 6" in compare(folder).out


def test_a_planned_unpaired_test_decides_with_four_seeds(tmp_path: Path, compare_json: Any) -> None:
    table = PlanTable(hypothesis="b is better", test="unpaired")
    plan = seal_plan(table, conditions=["a+none", "b+none"], seeds=range(4), max_steps=20, written=WRITTEN)
    effects = {"a+none": 0.0, "b+none": 0.3}
    folder = write_campaign(tmp_path / "c", effects, seeds=range(4), steps=20, plan=plan)
    [found] = compare_json(folder)["comparisons"]
    assert (found["verdict"], found["least_seeds"], found["p"]) == ("better", 4, pytest.approx(2 / 70))
    assert found["looks"]["design"] == "unpaired"
    paired = write_campaign(tmp_path / "p", effects, seeds=range(4), steps=20)
    [found] = compare_json(paired)["comparisons"]
    assert (found["verdict"], found["least_seeds"]) == ("cannot tell", 6)


def test_a_verdict_that_lost_runs_decide_says_so_in_its_first_words(tmp_path: Path, compare_json: Any) -> None:
    effects, lost = {"a+none": 0.0, "b+none": 0.1}, {("b+none", seed): "failed" for seed in (6, 7, 8)}
    folder = write_campaign(tmp_path / "c", effects, seeds=range(9), steps=20, states=lost, spread=0.04)
    data = compare_json(folder)
    [found] = data["comparisons"]
    assert not found["lost"]["survives"]
    assert found["line"].startswith("better, unless lost runs were bad: ")
    assert data["answer"].startswith("b+none is better than a+none, unless lost runs were bad: ")
