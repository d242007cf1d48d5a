"""`better` is withheld from a condition that does not beat its controls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.kernel.seeding import Seeds
from retrain.records.run import Control, control_label
from retrain.records.runs.curves import Direction, Metric
from retrain.records.runs.source import find_runs
from retrain.verdicts.study.comparison import Comparison, Verdict, VerdictReason
from retrain.verdicts.study.judge import Pairing, judge
from retrain.verdicts.study.safeguards import controls_sentence, with_controls
from retrain.verdicts.study.study import Options, Study, study_of
from tests.kit.edited import edit
from tests.kit.pairings import pairing

SEEDS = tuple(range(1, 9))
RATE = Metric("eval_correct_rate")
Values = Mapping[str, Any]  # label to a value per seed


def judged(values: Values, baseline: str = "a", direction: Direction = Direction.HIGHER) -> tuple[Comparison, ...]:
    """The comparisons of made-up values, a value per seed and condition; controls are found by their labels."""

    def pair(left: str, right: str) -> Pairing:
        return pairing(values.get(right, ()), values.get(left, ()), labels=(left, right))

    controls = {label: (of, each) for of in values for each in Control if (label := control_label(of, each)) in values}
    pairs = [pair(baseline, label) for label in values if label != baseline and label not in controls]
    alone = judge(pairs, alpha=0.05, direction=direction)
    return with_controls(alone, controls, pair, alpha=0.05, direction=direction)


def rates(mean: float, *, spread: float = 0.01, stream: int = 0, size: int = 10) -> Any:
    return mean + spread * Seeds(7).stream("test", stream).standard_normal(size)


def test_a_gain_beyond_the_controls_is_better() -> None:
    values = {"a": rates(0.5), "b": rates(0.7, stream=1)}
    (plain,) = judged(values)
    assert (plain.verdict, plain.controls) == (Verdict.BETTER, None)
    (found,) = judged({**values, "b+random_reward": rates(0.52, stream=2), "b+no_update": rates(0.5, stream=3)})
    assert found.verdict is Verdict.BETTER
    assert found.controls is not None
    assert [(each.control, each.is_beaten) for each in found.controls.results] == [
        ("random_reward", True),
        ("no_update", True),
    ]
    assert (found.p, found.p_holm, found.num_comparisons) == (plain.p, plain.p_holm, 1)  # controls cost no comparison
    sentence = controls_sentence(found, RATE)
    assert sentence.startswith("better than its controls random_reward (+")
    assert controls_sentence(plain, RATE) == ""


@pytest.mark.parametrize("control", list(Control))
def test_a_gain_that_a_control_has_too_is_withheld(control: Control) -> None:
    values = {"a": rates(0.5), "b": rates(0.7, stream=1), control_label("b", control): rates(0.7, stream=2)}
    (found,) = judged(values)
    assert (found.verdict, found.cause) == (Verdict.CANNOT_TELL, VerdictReason.NOT_BEYOND_CONTROL)
    assert controls_sentence(found, RATE).startswith(f"not better than its control {control} (")


def test_lower_may_be_better_and_a_control_that_does_better_is_not_beaten() -> None:
    values = {"a": rates(0.7), "b": rates(0.5, stream=1), "b+no_update": rates(0.69, stream=2)}
    assert judged(values, direction=Direction.LOWER)[0].verdict is Verdict.BETTER
    assert judged(values)[0].verdict is Verdict.WORSE  # that needs no control
    values["b+no_update"] = rates(0.4, stream=2)
    assert judged(values, direction=Direction.LOWER)[0].cause is VerdictReason.NOT_BEYOND_CONTROL
    turned = {label: 1.0 - each for label, each in values.items()}
    assert judged(turned)[0].cause is VerdictReason.NOT_BEYOND_CONTROL


def test_a_condition_without_the_controls_of_another_has_not_beaten_them() -> None:
    values = {
        "a": rates(0.5),
        "b": rates(0.7, stream=1),
        "c": rates(0.7, stream=2),
        "c+no_update": rates(0.5, stream=3),
    }
    first, second = judged(values)
    assert (first.cause, second.verdict) == (VerdictReason.NOT_BEYOND_CONTROL, Verdict.BETTER)
    assert controls_sentence(first, RATE) == "not better than its control no_update (no finished run to compare with)"


def test_holm_runs_over_the_weakest_test_of_every_claim() -> None:
    """The p values are those of the claims: 0.002 for c alone, and 1 for b, whose control is as good as b."""
    values = {"a": rates(0.5), "b": rates(0.7, stream=1), "c": rates(0.7, stream=2)}
    values |= {"b+no_update": rates(0.7, stream=3), "c+no_update": rates(0.5, stream=4)}
    first, second = judged(values)
    assert first.controls is not None
    assert second.controls is not None
    assert first.controls.p_holm == 1.0
    assert second.controls.p_holm == pytest.approx(2 * 2 / 2**10)
    assert second.verdict is Verdict.BETTER


@pytest.mark.long
def test_no_false_better_beyond_alpha_when_the_gain_is_the_controls() -> None:
    """b beats its baseline by as much as its control does: `better` would be false, and is said in 5 % at most."""
    stream, said, tries = Seeds(20).stream("controls"), 0, 2000
    for _ in range(tries):
        draws = stream.standard_normal((3, 8))
        (found,) = judged({"a": draws[0], "b": 5.0 + draws[1], "b+random_reward": 5.0 + draws[2]})
        said += found.verdict is Verdict.BETTER
    assert said / tries <= 0.05 / 2 + 2 * np.sqrt(0.05 * 0.95 / tries)  # one side of a two-sided test


@pytest.fixture
def campaign(made: Any, tmp_path: Path) -> Callable[..., Path]:
    """`campaign(effects, plan=...)`: a made-up campaign of eight seeds."""
    return lambda effects, **more: made.write_campaign(tmp_path / "c", effects, seeds=SEEDS, steps=20, **more)


EFFECTS = {"grpo+none": -0.2, "maxrl+none": 0.1, "maxrl+none+format_only": 0.1}


def studied(folder: Path) -> tuple[Study, Comparison]:
    study = study_of(find_runs([folder]), Options())
    (comparison,) = study.comparisons
    return study, comparison


@pytest.mark.parametrize("effect", [0.1, -0.2])
def test_a_campaign_with_controls_compares_them_only_with_their_condition(
    effect: float, campaign: Callable[..., Path], compare_json: Callable[..., Any]
) -> None:
    folder = campaign({**EFFECTS, "maxrl+none+format_only": effect})
    study, comparison = studied(folder)
    assert [each.label for each in study.conditions] == list(EFFECTS)
    assert (comparison.condition, comparison.num_comparisons) == ("maxrl+none", 1)
    assert comparison.controls is not None
    assert comparison.controls.results[0].label == "maxrl+none+format_only"
    (said,) = compare_json(folder)["comparisons"]
    assert (said["verdict"], said["cause"]) == (comparison.verdict, comparison.cause)
    if effect < 0:
        assert comparison.verdict is Verdict.BETTER
    else:
        assert comparison.cause is VerdictReason.NOT_BEYOND_CONTROL
        assert "not better than its control format_only" in said["line"]


def test_runs_that_say_that_they_are_none_are_no_controls(campaign: Callable[..., Path]) -> None:
    folder = campaign(EFFECTS)
    for file in folder.glob("runs/*format_only*/run.json"):
        edit(file, lambda record: record["config"]["training"].pop("control"))
    study = study_of(find_runs([folder]), Options())
    assert [each.condition for each in study.comparisons] == ["maxrl+none", "maxrl+none+format_only"]
    assert all(each.controls is None for each in study.comparisons)
