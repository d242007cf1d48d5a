"""`better` is withheld from a condition that does not beat its controls; `practically the same` within a margin."""

import numpy as np
import pytest
from pydantic import ValidationError
from scipy.stats import ttest_1samp

from retrain.campaign.load import PlanTable, seal_plan
from retrain.kernel.seeding import Seeds
from retrain.records.run import Control, control_label
from retrain.records.runs.curves import Align, Direction, Metric
from retrain.records.runs.source import find_runs
from retrain.verdicts.stats.binomial import held_out_limits, training_limits
from retrain.verdicts.stats.flip import FlipTest
from retrain.verdicts.stats.paired import t_interval
from retrain.verdicts.study.comparison import Verdict, VerdictReason
from retrain.verdicts.study.judge import judge, with_few_seeds, with_margin
from retrain.verdicts.study.safeguards import controls_sentence, with_controls, with_seeds
from retrain.verdicts.study.study import Options, options_of, study_of
from tests.kit.edited import edit, edit_lines, set_if
from tests.kit.pairings import pairing

SEEDS = tuple(range(1, 9))
RATE = Metric("eval_correct_rate")


def judged(values, baseline="a", direction=Direction.HIGHER):
    """The comparisons of made-up values, a value per seed and condition; controls are found by their labels."""

    def pair(left, right):
        return pairing(values.get(right, ()), values.get(left, ()), labels=(left, right))

    controls = {label: (of, each) for of in values for each in Control if (label := control_label(of, each)) in values}
    pairs = [pair(baseline, label) for label in values if label != baseline and label not in controls]
    alone = judge(pairs, alpha=0.05, direction=direction)
    return with_controls(alone, controls, pair, alpha=0.05, direction=direction)


def rates(mean, *, spread=0.01, stream=0, size=10):
    return mean + spread * Seeds(7).stream("test", stream).standard_normal(size)


def test_a_gain_beyond_the_controls_is_better_in_either_direction():
    values = {"a": rates(0.5), "b": rates(0.7, stream=1)}
    (plain,) = judged(values)
    assert (plain.verdict, plain.controls) == (Verdict.BETTER, None)
    (found,) = judged({**values, "b+random_reward": rates(0.52, stream=2), "b+no_update": rates(0.5, stream=3)})
    assert found.verdict is Verdict.BETTER
    assert [(each.control, each.is_beaten) for each in found.controls.results] == [
        ("random_reward", True),
        ("no_update", True),
    ]
    assert (found.p, found.p_holm, found.num_comparisons) == (plain.p, plain.p_holm, 1)  # controls cost no comparison
    sentence = controls_sentence(found, RATE)
    assert sentence.startswith("better than its controls random_reward (+")
    assert controls_sentence(plain, RATE) == ""
    values = {"a": rates(0.7), "b": rates(0.5, stream=1), "b+no_update": rates(0.69, stream=2)}
    assert judged(values, direction=Direction.LOWER)[0].verdict is Verdict.BETTER
    assert judged(values)[0].verdict is Verdict.WORSE  # that needs no control
    values["b+no_update"] = rates(0.4, stream=2)
    assert judged(values, direction=Direction.LOWER)[0].cause is VerdictReason.NOT_BEYOND_CONTROL
    turned = {label: 1.0 - each for label, each in values.items()}
    assert judged(turned)[0].cause is VerdictReason.NOT_BEYOND_CONTROL


@pytest.mark.parametrize("control", list(Control))
def test_a_gain_that_a_control_has_too_is_withheld(control):
    values = {"a": rates(0.5), "b": rates(0.7, stream=1), control_label("b", control): rates(0.7, stream=2)}
    (found,) = judged(values)
    assert (found.verdict, found.cause) == (Verdict.CANNOT_TELL, VerdictReason.NOT_BEYOND_CONTROL)
    assert controls_sentence(found, RATE).startswith(f"not better than its control {control} (")


def test_missing_controls_are_not_beaten_and_holm_runs_over_the_weakest_test():
    values = {"a": rates(0.5), "b": rates(0.7, stream=1), "c": rates(0.7, stream=2)}
    values["c+no_update"] = rates(0.5, stream=3)
    first, second = judged(values)
    assert (first.cause, second.verdict) == (VerdictReason.NOT_BEYOND_CONTROL, Verdict.BETTER)
    assert controls_sentence(first, RATE) == "not better than its control no_update (no finished run to compare with)"
    # The p values are those of the claims: 0.002 for c alone, and 1 for b, whose control is as good as b.
    values |= {"b+no_update": rates(0.7, stream=3), "c+no_update": rates(0.5, stream=4)}
    first, second = judged(values)
    assert first.controls.p_holm == 1.0
    assert second.controls.p_holm == pytest.approx(2 * 2 / 2**10)
    assert second.verdict is Verdict.BETTER


def test_a_condition_without_data_claims_nothing_against_its_control():
    (found,) = judged({"a": (), "b": rates(0.7), "b+no_update": rates(0.5, stream=1)})
    assert (found.cause, found.difference, found.controls.p_holm) == (VerdictReason.TOO_FEW, None, 1.0)


def test_a_condition_that_beats_its_control_can_still_fail_by_the_correction():
    low, high = [0.1 * each for each in range(10)], [1.0 + 0.1 * each for each in range(10)]
    values = {"a": low} | dict.fromkeys("bcde", high) | {f"{label}+no_update": low[:7] for label in "bcde"}
    for found in judged(values):
        assert (found.verdict, found.cause) == (Verdict.CANNOT_TELL, VerdictReason.NOT_BEYOND_CONTROL)
        assert [(each.is_beaten, each.p) for each in found.controls.results] == [(True, 2 / 2**7)]
        assert found.controls.p_holm == 4 * 2 / 2**7
        assert "0.062" in controls_sentence(found, RATE)


def test_few_seeds_give_the_interval_of_the_difference():
    left, right = {0: 0.1, 1: 0.5, 2: 0.2}, {0: 0.2, 1: 0.8, 2: 0.4}
    pair = pairing(list(right.values()), list(left.values()))
    found = judge([pair], alpha=0.1, direction=Direction.HIGHER)
    (found,) = with_few_seeds(with_seeds(found, {"a": left, "b": right}, direction=Direction.HIGHER))
    limits = ttest_1samp([0.1, 0.3, 0.2], 0.0).confidence_interval(0.9)
    assert found.few_seeds.interval == pytest.approx(tuple(limits))
    assert (found.few_seeds.level, found.few_seeds.is_of_examples) == (0.9, False)


@pytest.fixture
def campaign(made, tmp_path):
    """`campaign(effects, plan=...)`: a made-up campaign of eight seeds."""
    return lambda effects, **more: made.write_campaign(tmp_path / "c", effects, seeds=SEEDS, steps=20, **more)


EFFECTS = {"grpo+none": -0.2, "maxrl+none": 0.1, "maxrl+none+format_only": 0.1}


def studied(folder):
    study = study_of(find_runs([folder]), Options())
    (comparison,) = study.comparisons
    return study, comparison


@pytest.mark.parametrize("effect", [0.1, -0.2])
def test_a_campaign_with_controls_compares_them_only_with_their_condition(effect, campaign, compare_json):
    folder = campaign({**EFFECTS, "maxrl+none+format_only": effect})
    study, comparison = studied(folder)
    assert [each.label for each in study.conditions] == list(EFFECTS)
    assert (comparison.condition, comparison.num_comparisons) == ("maxrl+none", 1)
    assert comparison.controls.results[0].label == "maxrl+none+format_only"
    (said,) = compare_json(folder)["comparisons"]
    assert (said["verdict"], said["cause"]) == (comparison.verdict, comparison.cause)
    if effect < 0:
        assert comparison.verdict is Verdict.BETTER
    else:
        assert comparison.cause is VerdictReason.NOT_BEYOND_CONTROL
        assert "not better than its control format_only" in said["line"]


def test_runs_that_say_that_they_are_none_are_no_controls(campaign):
    folder = campaign(EFFECTS)
    for file in folder.glob("runs/*format_only*/run.json"):
        edit(file, lambda record: record["config"]["training"].pop("control"))
    study = study_of(find_runs([folder]), Options())
    assert [each.condition for each in study.comparisons] == ["maxrl+none", "maxrl+none+format_only"]
    assert all(each.controls is None for each in study.comparisons)


SMALL = [0.01, -0.01, 0.005, 0.0075, -0.005, 0.002, -0.0075, -0.002]


def judged_with_margin(*diffs, margin=0.02, direction=Direction.HIGHER):
    pairings = [pairing(each) for each in diffs]
    return with_margin(judge(pairings, alpha=0.05, direction=direction), pairings, margin)


def test_inside_the_margin_is_the_same_and_outside_or_without_one_is_open():
    (same,), (open_one,), (without,) = (judged_with_margin(SMALL, margin=each) for each in (0.02, 0.004, None))
    assert (same.verdict, same.cause, same.margin) == (Verdict.PRACTICALLY_SAME, VerdictReason.WITHIN, 0.02)
    assert open_one.verdict is Verdict.CANNOT_TELL
    assert (without.verdict, without.margin) == (Verdict.CANNOT_TELL, None)
    (at_it,), (barely,) = judged_with_margin([0.02] * 8), judged_with_margin([0.02 - 1e-9] * 8)
    assert (at_it.verdict, barely.verdict) == (Verdict.BETTER, Verdict.PRACTICALLY_SAME)


@pytest.mark.parametrize("direction", Direction)
def test_a_difference_that_is_found_and_too_small_to_matter_is_the_same(direction):
    (found,) = judged_with_margin([0.010, 0.011, 0.012, 0.009, 0.010, 0.011, 0.012, 0.009], direction=direction)
    assert (found.verdict, found.cause) == (Verdict.PRACTICALLY_SAME, VerdictReason.FOUND_WITHIN)
    (large,) = judged_with_margin([0.1 + each for each in SMALL], direction=direction)
    assert large.verdict is (Verdict.BETTER if direction is Direction.HIGHER else Verdict.WORSE)


@pytest.mark.parametrize("num_seeds", [0, 1, 2, 5])
def test_too_few_seeds_are_never_the_same(num_seeds):
    """Not even when every difference is zero: the interval has no limit."""
    (found,) = judged_with_margin([0.0] * num_seeds, margin=1e9)
    assert found.verdict is Verdict.CANNOT_TELL


def test_the_whole_family_sets_the_level():
    """At the last step of Holm's correction stands the smallest difference, with an interval at 95 %: too narrow."""
    clear = [0.5 + each for each in SMALL]
    *_, last = judged_with_margin(clear, clear, clear, SMALL)
    assert last.level == 1 - 0.05 / 4
    assert last.interval == FlipTest.of(np.array(SMALL)).interval(1 - 0.05 / 4)
    assert last.verdict is Verdict.PRACTICALLY_SAME
    low, high = FlipTest.of(np.array(SMALL)).interval(0.95)
    between = (max(-low, high) + max(-last.interval[0], last.interval[1])) / 2
    *_, last = judged_with_margin(clear, clear, clear, SMALL, margin=between)
    assert last.verdict is Verdict.CANNOT_TELL
    assert max(abs(limit) for limit in last.interval or ()) > between  # so the page does not contradict itself


def test_a_plan_with_a_margin_decides_on_disk(made, tmp_path, compare_json):
    table = PlanTable(hypothesis="no harm", margin=0.5)
    labels = ["grpo+none", "maxrl+none"]
    plan = seal_plan(table, conditions=labels, seeds=range(8), max_steps=20, written=made.WRITTEN)
    folder = made.write_campaign(tmp_path, dict.fromkeys(labels, 0.0), seeds=range(8), steps=20, plan=plan)
    content = compare_json(folder)
    (found,) = content["comparisons"]
    assert (found["verdict"], found["margin"], content["plan"]["margin"]) == ("practically the same", 0.5, 0.5)
    assert "practically the same" in found["line"]
    assert "±50.0 pp" in found["explanation"]
    (other,) = compare_json(folder, "--metric", "correct_rate")["comparisons"]
    assert other["margin"] is None  # the margin is of the planned metric


def test_the_margin_is_positive_finite_and_sealed_and_an_absent_one_leaves_old_seals_unchanged():
    def sealed(**keys):
        table = PlanTable(hypothesis="h", **keys)
        return seal_plan(table, conditions=["a"], seeds=[1], max_steps=1, written="2026-03-01T12:00:00+00:00")

    assert "margin" not in sealed()
    assert sealed(margin=0.02)["sha256"] != sealed(margin=0.03)["sha256"] != sealed()["sha256"]
    for margin in (0.0, -0.1, float("inf"), float("nan")):
        with pytest.raises(ValidationError):
            sealed(margin=margin)


def test_options_at_their_bounds_are_taken_as_given():
    given = {"align": "tokens", "at": 0.5, "last": 1, "alpha": 0.499, "metric": None}
    found = options_of(**given, lower=True, called=str)
    assert found == Options(align=Align.TOKENS, at=0.5, last=1, alpha=0.499, direction=Direction.LOWER)
    for at in (None, 1, 1.0):
        given = dict.fromkeys(given) | {"align": "steps", "at": at}
        assert options_of(**given, lower=False, called=str) == Options(at=at)


@pytest.mark.parametrize(("size", "prompts"), [(5, 5), (1, 1), (0, 1), ("5", 1), (10**6, 8), (10**6 + 1, 1)])
def test_a_rate_is_as_exact_as_its_prompts_or_examples_allow(size, prompts, made, tmp_path):
    folder = made.write_campaign(tmp_path, {"a+none": 0.0}, seeds=range(3), steps=4)
    edit(folder / "runs/a+none_s1/run.json", lambda record: record["config"]["training"].update(batch_size=size))
    for metric, limits in (("correct_rate", training_limits), ("eval_correct_rate", held_out_limits)):
        study = study_of(find_runs([folder]), Options(metric=Metric(metric)))
        found = study.conditions[0].estimates[str(Metric(metric))]
        values_N = np.array(list(found.values.values()))
        count = prompts if metric == "correct_rate" else study.num_examples
        assert (found.mean, found.interval) == (values_N.mean(), limits(values_N, count))


def test_what_is_only_named_like_a_rate_has_an_interval_over_seeds(made, tmp_path):
    folder = made.write_campaign(tmp_path, {"a+none": 0.0}, seeds=range(3), steps=4)
    edit_lines(folder / "runs/a+none_s1/metrics.jsonl", set_if("correct_rate", lambda rate: rate - 1.0))
    (condition,) = study_of(find_runs([folder]), Options(metric=Metric("correct_rate"))).conditions
    found = condition.estimates[str(Metric("correct_rate"))]
    assert found.interval == t_interval(np.array(list(found.values.values())))
