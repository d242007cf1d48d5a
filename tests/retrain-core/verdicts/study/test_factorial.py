"""Main effects and interactions of a factorial: mixtures of conditions, judged as pairs, and sentences on them."""

import json
from itertools import product

import numpy as np
import pytest

from retrain.kernel.seeding import Seeds
from retrain.records.run import Control, control_label
from retrain.records.runs.source import find_runs
from retrain.verdicts.stats.flip import FlipTest
from retrain.verdicts.study.comparison import Verdict, VerdictReason
from retrain.verdicts.study.factorial import Factorial, factorial_of, mixed
from retrain.verdicts.study.study import Options, study_of
from retrain.verdicts.wording.plain_words import summary
from retrain.verdicts.wording.verdict_line import answer, effect_sentence
from tests.kit.edited import edit

SEEDS = tuple(range(1, 9))
CELLS = ["grpo+none", "grpo+gtpo", "maxrl+none", "maxrl+gtpo"]
FACTORS = {
    "advantage_mode": {label: label.partition("+")[0] for label in CELLS},
    "transform_mode": {label: label.partition("+")[2] for label in CELLS},
}
A, B = "advantage_mode=maxrl", "transform_mode=gtpo"


def drawn(labels, *stream):
    rng = Seeds(5).stream("factorial", *stream)
    return {label: dict(zip(SEEDS, rng.normal(0.5, 0.1, len(SEEDS)).tolist(), strict=True)) for label in labels}


def array(values):
    return np.array([values[seed] for seed in SEEDS])


def test_two_by_two_by_hand():
    found, values = factorial_of(FACTORS, CELLS[0]), drawn(CELLS)
    a0b0, a0b1, a1b0, a1b1 = (array(values[label]) for label in CELLS)
    all_values = found.with_mixtures(values)
    expected = {A: (a1b0 + a1b1 - a0b0 - a0b1) / 2, B: (a0b1 + a1b1 - a0b0 - a1b0) / 2}
    expected[f"{A} × {B}"] = a1b1 - a0b1 - a1b0 + a0b0
    assert [each.condition for each in found.effects] == list(expected)
    assert [each.baseline for each in found.effects] == ["advantage_mode=grpo", "transform_mode=none", f"{A} + {B}"]
    for effect in found.effects:
        difference = array(all_values[effect.condition]) - array(all_values[effect.baseline])
        np.testing.assert_allclose(difference, expected[effect.condition], atol=1e-11)


def test_the_baseline_gives_the_reference_levels():
    first, last = (factorial_of(FACTORS, label) for label in (CELLS[0], CELLS[-1]))
    assert [each.condition for each in last.effects][:2] == ["advantage_mode=grpo", "transform_mode=none"]
    values = drawn(CELLS)
    for left, right in zip(first.effects, last.effects, strict=True):
        sizes = []
        for factorial, effect in ((first, left), (last, right)):
            known = factorial.with_mixtures(values)
            sizes.append(array(known[effect.condition]) - array(known[effect.baseline]))
        sign = -1 if len(left.levels) == 1 else 1  # an interaction has no side
        np.testing.assert_allclose(sizes[0], sign * sizes[1], atol=1e-11)


def test_three_factors_of_two_three_and_two_levels():
    """Every effect is the contrast of the saturated linear model, averaged over the other factors."""
    labels = [f"c{number}" for number in range(12)]
    levels = dict(zip(labels, product([0.1, 0.2], [1, 2, 4], ["x", "y"]), strict=True))
    factors = {name: {label: levels[label][at] for label in labels} for at, name in enumerate(("lr", "rank", "mode"))}
    values_NABC = Seeds(3).stream("factorial", "three").normal(size=(8, 2, 3, 2))
    flat_NK = values_NABC.reshape(8, 12)
    values = {label: dict(zip(SEEDS, flat_NK[:, place].tolist(), strict=True)) for place, label in enumerate(labels)}
    found = factorial_of(factors, "c0")
    means_NAB, means_NB = values_NABC.mean(axis=3), values_NABC.mean(axis=(1, 3))
    expected = {"rank=4": means_NB[:, 2] - means_NB[:, 0]}
    expected["lr=0.2 × rank=2"] = (means_NAB[:, 1, 1] - means_NAB[:, 1, 0]) - (means_NAB[:, 0, 1] - means_NAB[:, 0, 0])
    known = found.with_mixtures(values)
    assert len(found.effects) == (1 + 2 + 1) + (2 + 1 + 2)
    assert {each.over for each in found.effects if each.condition == "rank=4"} == {("lr", "mode")}
    for label, difference_N in expected.items():
        [effect] = [each for each in found.effects if each.condition == label]
        np.testing.assert_allclose(array(known[label]) - array(known[effect.baseline]), difference_N, atol=1e-11)


def test_a_tie_of_decimal_rates_stays_a_tie():
    """0.6 + 0.5 - 0.4 is not 0.7 in floats: without rounding that seed would have a sign."""
    rates = dict(zip(CELLS, (0.4, 0.6, 0.5, 0.7), strict=True))
    found = factorial_of(FACTORS, CELLS[0])
    known = found.with_mixtures({label: dict.fromkeys(SEEDS, rate) for label, rate in rates.items()})
    effect = found.effects[-1]
    assert set(known[effect.condition].values()) == set(known[effect.baseline].values())
    assert mixed({"a": 1.0}, {"a": {1: 0.0}}) == {1: 0.0}


@pytest.mark.parametrize(
    ("factors", "baseline"),
    [
        ({}, CELLS[0]),
        (FACTORS, "another"),
        ({**FACTORS, "lr": {}}, CELLS[0]),
        ({name: dict(list(levels.items())[:3]) for name, levels in FACTORS.items()}, CELLS[0]),
        ({**FACTORS, "advantage_mode": dict.fromkeys(CELLS, "grpo")}, CELLS[0]),
    ],
)
def test_what_is_no_factorial_has_no_effects(factors, baseline):
    assert factorial_of(factors, baseline) == Factorial()


def test_the_order_of_the_record_changes_nothing():
    """Otherwise conditions that are reordered in manifest.json would turn the sign of an effect."""
    turned = {name: dict(reversed(levels.items())) for name, levels in reversed(FACTORS.items())}
    first, second = (factorial_of(each, CELLS[0]) for each in (FACTORS, turned))
    assert {each.condition for each in second.effects[:2]} == {A, B}
    assert second.mixtures[A] == first.mixtures[A]


@pytest.fixture
def campaign(made, tmp_path):
    """`campaign(effects)`: a made-up factorial of eight seeds, with `factors` in its campaign.json."""

    def write(effects, factors=None, **more):
        given = {"spread": 0.005, "steps": 20} | more
        folder = made.write_campaign(tmp_path / "c", effects, seeds=SEEDS, **given)
        content = {"conditions": {}, "factors": factors or FACTORS}
        (folder / "campaign.json").write_text(json.dumps(content), encoding="utf-8")
        return folder

    return write


def studied(folder, **options):
    return study_of(find_runs([folder]), Options(**options))


ADDED = dict(zip(CELLS, (-0.2, -0.2, 0.0, 0.0), strict=True))


def test_a_campaign_says_which_part_did_it(campaign):
    study = studied(campaign(ADDED, example_spread=0.5))
    main, none, both = study.comparisons
    assert (main.verdict, none.verdict, both.verdict) == (Verdict.BETTER, Verdict.CANNOT_TELL, Verdict.CANNOT_TELL)
    assert {each.num_comparisons for each in study.comparisons} == {3}
    diffs_N = array(study.values[main.condition]) - array(study.values[main.baseline])
    assert main.p == FlipTest.of(diffs_N).p
    assert main.examples.estimate == pytest.approx(main.difference)
    assert main.examples.interval
    said = effect_sentence(main, study)
    assert said.startswith("Main effect of advantage_mode: maxrl is better than grpo, averaged over transform_mode: +")
    assert effect_sentence(both, study).startswith(f"Interaction: {A} and {B} may help or hinder each other: ")
    assert answer(study).startswith("Effects of the factors, over 8 seeds, on these 64 examples: better: ")
    assert summary(study)[1:4] == [f"{effect_sentence(each, study)}." for each in study.comparisons]


def test_parts_that_help_only_together(campaign):
    study = studied(campaign(dict(zip(CELLS, (-0.2, -0.2, -0.2, 0.1), strict=True))))
    main, _, both = study.comparisons
    assert both.verdict is Verdict.BETTER
    assert both.difference > 0.1
    assert effect_sentence(main, study).endswith("; an average of unlike effects, since it depends on transform_mode")


def test_other_questions_can_still_be_asked(campaign):
    folder = campaign(ADDED)
    pairs = studied(folder, all_pairs=True)
    assert len(pairs.comparisons) == 6
    assert not any(each.effect for each in pairs.comparisons)
    turned = studied(folder, baseline="maxrl+gtpo")
    assert turned.comparisons[0].verdict is Verdict.WORSE


@pytest.mark.parametrize("reached", [-0.2, 0.0])
def test_an_effect_must_beat_the_controls_of_its_conditions(reached, campaign):
    controls = {control_label(label, Control.RANDOM_REWARD): reached for label in CELLS[1:]}
    main = studied(campaign({**ADDED, **controls})).comparisons[0]
    assert main.controls.results[0].label == f"{A}+random_reward"
    if reached < 0.0:
        assert main.verdict is Verdict.BETTER
    else:
        assert main.cause is VerdictReason.NOT_BEYOND_CONTROL


def test_a_seed_counts_where_all_conditions_of_the_effect_have_it(campaign):
    study = studied(campaign(ADDED, states={("maxrl+gtpo", 3): "failed"}))
    main = study.comparisons[0]
    assert main.seeds == tuple(seed for seed in SEEDS if seed != 3)
    assert (main.lost.baseline_seeds, main.lost.condition_seeds) == ((), (3,))
    assert main.lost.difference < main.difference


def test_factors_that_do_not_fit_leave_the_pairs(campaign):
    folder = campaign(ADDED)
    edit(folder / "campaign.json", lambda content: content.update(factors={"lr": "many", "rank": {"grpo+none": [1]}}))
    assert [each.condition for each in studied(folder).comparisons] == CELLS[1:]


def test_a_planned_look_waits_for_every_condition_of_an_effect():
    found = factorial_of(FACTORS, CELLS[0])
    cells = frozenset((label, seed) for label in CELLS for seed in (1, 2)) - {("grpo+gtpo", 2)}
    ended = found.ended(cells)
    assert (A, 2) in ended  # of maxrl alone
    assert {("advantage_mode=grpo", 1), (f"{A} + {B}", 1)} <= ended
    assert ("advantage_mode=grpo", 2) not in ended
