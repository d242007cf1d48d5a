"""Fields of the metrics line, pass@k against its definition, and an interval with the promised coverage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from retrain.kernel.types import Completion, Group, Outcome, Score, StopReason, group_status
from retrain.observe.metrics.evaluate import eval_metrics, pass_at_k, rate_interval
from retrain.observe.metrics.fields import group_metrics, length_metrics, quantiles, reward_metrics

RIGHT, WRONG = Score.of(1.0), Score.of(0.0)


@settings(max_examples=60)
@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(numbers: tuple[int, int, int]) -> None:
    samples, right, k = numbers
    subsets = list(combinations([True] * right + [False] * (samples - right), k))
    assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_metrics_of_two_examples() -> None:
    metrics = eval_metrics([(RIGHT, WRONG, WRONG, WRONG), (RIGHT, RIGHT, RIGHT, RIGHT)])
    assert metrics["eval_correct_rate"] == 0.625
    assert [metrics[f"eval_pass_at_{k}"] for k in (1, 2, 4)] == [0.625, 0.75, 1.0]
    assert (metrics["eval_examples"], metrics["eval_samples"]) == (2, 4)
    assert set(metrics) == {
        *("eval_correct_rate", "eval_ci_low", "eval_ci_high", "eval_examples", "eval_samples"),
        *("eval_pass_at_1", "eval_pass_at_2", "eval_pass_at_4"),
        *("eval_mean_reward", "eval_reward_p10", "eval_reward_p50", "eval_reward_p90"),
    }


def test_graded_rewards_and_their_parts() -> None:
    scores = [replace(Score.of(value), parts={"math": value, "format": 1.0}) for value in (0.2, 0.4, 0.6, 0.9)]
    scores.append(Score(outcome=Outcome.FAILED, parts={"format": 0.5}))
    metrics = eval_metrics([scores[:2], scores[2:4]])
    assert metrics["eval_mean_reward"] == pytest.approx(0.525)
    assert [metrics[f"eval_reward_p{percent}"] for percent in (10, 50, 90)] == [0.2, 0.4, 0.9]
    assert (metrics["eval_correct_rate"], metrics["eval_reward_math_mean"]) == (0.5, pytest.approx(0.525))
    assert eval_metrics([scores[:2], scores[2:4]], 0.8)["eval_correct_rate"] == 0.25
    assert eval_metrics([scores])["eval_reward_format_mean"] == pytest.approx(0.9)  # of all five
    none = eval_metrics([(Score.no_verdict("x"),)])
    assert not [name for name in none if "reward" in name]
    mixed = (RIGHT, Score.failed("x"), Score.no_verdict("x"), Score.of(0.5))
    assert eval_metrics([mixed])["eval_correct_rate"] == 0.25, "only a verdict above one half is right"
    names = {name for name in eval_metrics([(RIGHT,) * 6]) if name.startswith("eval_pass")}
    assert names == {"eval_pass_at_1", "eval_pass_at_2", "eval_pass_at_4"}


COUNTS = st.integers(1, 8).flatmap(
    lambda samples: st.tuples(st.just(samples), st.lists(st.integers(0, samples), min_size=1, max_size=30))
)


@given(COUNTS)
def test_the_interval_contains_the_rate_and_narrows_with_more_examples(counts: tuple[int, list[int]]) -> None:
    samples, right = counts
    rates_E = np.array(right) / samples
    low, high = rate_interval(rates_E, samples)
    assert 0.0 <= low <= rates_E.mean() + 1e-12
    assert rates_E.mean() - 1e-12 <= high <= 1.0
    assert low < high
    metrics = eval_metrics([(RIGHT,) * r + (WRONG,) * (samples - r) for r in right])
    passes = [value for name, value in metrics.items() if name.startswith("eval_pass_at_")]
    assert passes == sorted(passes)
    assert passes[0] == pytest.approx(metrics["eval_correct_rate"])
    assert all(np.isfinite(value) for value in metrics.values())
    lower, higher = rate_interval(np.tile(rates_E, 16), samples)
    assert higher - lower < high - low


@pytest.mark.parametrize(("right", "examples"), [(8, 10), (0, 12), (64, 64), (63, 64)])
def test_the_interval_of_independent_answers_is_exact(right: int, examples: int) -> None:
    want = stats.binomtest(right, examples).proportion_ci(method="exact")
    assert rate_interval(np.array([1.0] * right + [0.0] * (examples - right)), 1) == pytest.approx(
        (want.low, want.high)
    )
    alike = rate_interval(np.array([1.0, 0.0] * 10), 4)
    mixed = rate_interval(np.array([0.5] * 20), 4)
    assert alike[1] - alike[0] > mixed[1] - mixed[0] - 1e-12


@pytest.mark.parametrize("chances", [(2.0, 2.0), (40.0, 0.4)])  # far from the edge, and 99 % right
def test_the_interval_covers_as_often_as_it_says(chances: tuple[float, float]) -> None:
    stream = np.random.default_rng(0)
    covered, trials, true = 0, 400, chances[0] / sum(chances)
    for _ in range(trials):
        chances_E = stream.beta(*chances, 64)
        low, high = rate_interval(stream.binomial(4, chances_E) / 4, 4)
        covered += low <= true <= high
    assert covered / trials >= 0.93


def test_copies_of_an_example_tell_no_more_than_one() -> None:
    rates_E = np.array([0.0, 0.25, 1.0, 0.75, 0.5, 1.0])
    copies_E, names = np.repeat(rates_E, 5), [name for name in "abcdef" for _ in range(5)]
    assert rate_interval(rates_E, 4, list("abcdef")) == rate_interval(rates_E, 4)
    assert rate_interval(copies_E, 4, names) == pytest.approx(rate_interval(rates_E, 4), abs=0.02)
    low, high = rate_interval(copies_E, 4)
    clustered = rate_interval(copies_E, 4, names)
    assert high - low < 0.6 * (clustered[1] - clustered[0])
    assert rate_interval(np.ones(30), 4, names) == rate_interval(np.ones(6), 4)
    assert rate_interval(np.array([0.5, 0.5]), 1, ["a", "a"]) == rate_interval(np.array([0.5]), 1)


@pytest.mark.long
def test_the_interval_covers_new_sources_of_unequal_sizes() -> None:
    stream, sizes = np.random.default_rng(1), np.array([1, 1, 2, 2, 3, 4, 6, 8] * 3)
    names = [str(index) for index, size in enumerate(sizes) for _ in range(size)]
    covered = {"with": 0, "without": 0}
    for _ in range(300):
        rates_E = stream.binomial(4, np.repeat(stream.beta(1.5, 1.5, sizes.size), sizes)) / 4
        for key, clusters in (("with", names), ("without", None)):
            low, high = rate_interval(rates_E, 4, clusters)
            covered[key] += low <= 0.5 <= high
    assert covered["with"] >= 0.92 * 300
    assert covered["without"] <= 0.85 * 300


MakeGroup = Callable[..., Group]
MakeCompletion = Callable[..., Completion]


def test_rates_are_over_all_completions_and_ties_over_verdicts(make_group: MakeGroup) -> None:
    fields = reward_metrics([make_group(1, 0, 0, None), make_group(1, 1, "broken", None), make_group(0.25, None)])
    assert fields == {
        "mean_reward": pytest.approx(3.25 / 6),
        "reward_p10": 0.0,
        "reward_p50": 0.25,
        "reward_p90": 1.0,
        "correct_rate": 3 / 10,
        "no_verdict_count": 3,
        "failed_score_count": 1,
        "reward_tie_eligible_groups": 2,
        "reward_tie_groups": 2,
        "reward_tie_group_rate": 1.0,
        "reward_uniform_groups": 1,
        "reward_uniform_group_rate": 0.5,
        "reward_tie_pair_rate": 2 / 4,
        "reward_unique_fraction_mean": pytest.approx((2 / 3 + 1 / 2) / 2),
    }
    none = reward_metrics([make_group(None, "broken")])
    assert not {"mean_reward", "reward_p10", "reward_p50", "reward_p90"} & set(none)
    assert (none["correct_rate"], np.isfinite(list(none.values())).all()) == (0.0, True)


def test_the_threshold_of_correct_is_the_groups_own(make_group: MakeGroup) -> None:
    group = make_group(0.3, 0.5, 0.8, 0.81, 1.0)
    rates = {above: reward_metrics([replace(group, correct_above=above)])["correct_rate"] for above in (0.0, 0.5, 0.8)}
    assert reward_metrics([group])["correct_rate"] == rates[0.5] == 0.6
    assert (rates[0.0], rates[0.8]) == (1.0, 0.4)


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=40))
def test_quantiles_are_scores_that_occur(values: list[float]) -> None:
    found = quantiles("reward", values)
    expected = np.quantile(np.array(values), [0.1, 0.5, 0.9], method="inverted_cdf")
    assert list(found.values()) == expected.tolist()
    assert list(found) == ["reward_p10", "reward_p50", "reward_p90"]


def test_useful_groups_and_why_the_others_are_not(make_group: MakeGroup) -> None:
    groups = (make_group(1, 0), make_group(1, 1), make_group(0, 0), make_group(0.5, 0.5), make_group(1, None))
    names = ("useful_groups", "all_right_groups", "all_wrong_groups", "tied_groups", "no_verdict_groups")
    assert group_metrics([group_status(group) for group in groups]) == dict.fromkeys(names, 1)


def test_lengths_are_of_all_completions(make_group: MakeGroup, make_completion: MakeCompletion) -> None:
    cut = make_completion([-1] * 6, stop_reason=StopReason.LENGTH)
    group = make_group(1, None, completions=[cut, make_completion([-1] * 2)])
    shares = {"max_token_hit_rate": 0.5, "mean_tokens": 4.0}
    assert length_metrics([group]) == shares | {"max_tokens_seen": 6, "sampled_tokens": 8}
