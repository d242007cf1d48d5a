"""Curves over learning rates: which conditions belong to one, and the width in which it keeps 90 % of its best."""

import json
import math

import pytest

from retrain.records.runs.curves import Direction, Metric
from retrain.verdicts.study.sensitivity import kept_width, sensitivities, sensitivity_sentence

RATES = [0.001, 0.002, 0.004, 0.008, 0.016]
RATE = Metric("eval_correct_rate")


def test_the_width_is_read_off_between_the_rates():
    width = kept_width(RATES, [0.0, 0.5, 1.0, 0.5, 0.0], Direction.HIGHER)
    assert (width.best, width.is_low_open, width.is_high_open) == (0.004, False, False)
    # A tenth of the best is a fifth of the way to half of it, over log(rate).
    assert width.low == pytest.approx(0.004 / 2**0.2)
    assert width.factor == pytest.approx(2**0.4)


def test_an_end_that_still_keeps_it_is_open():
    width = kept_width(RATES, [0.95, 1.0, 0.95, 0.8, 0.99], Direction.HIGHER)
    assert (width.low, width.is_low_open, width.is_high_open) == (pytest.approx(0.001), True, False)
    assert 0.004 < width.high < 0.008  # a later rise beyond a fall does not count
    assert width.words.startswith("at least ")


def test_where_lower_is_better_it_rises_to_best_over_nine_tenths():
    width = kept_width(RATES, [4.0, 2.0, 1.8, 2.2, 5.0], Direction.LOWER)
    assert (width.best, width.low) == (0.004, pytest.approx(0.002))
    assert width.high == pytest.approx(0.004 * 2**0.5)
    assert kept_width(RATES, [-1.0] * 5, Direction.LOWER) is None
    assert kept_width(RATES, [0.0] * 5, Direction.HIGHER) is None


def declared(*rates, **others):
    return {f"{name}~lr={rate}": {"training.lr": rate, "x": name} for name in others or ("a",) for rate in rates}


def test_conditions_that_differ_only_in_their_rate_are_one_curve():
    known = declared(*RATES, a=0, b=0) | {"other": {"training.lr": 0.5, "x": "c"}, "odd": {"x": "a"}}
    known["a"] = known.pop("a~lr=0.004")
    values = {label: {1: 0.5, 2: 0.7} for label in known}
    first, second = sensitivities(known, values, direction=Direction.HIGHER)
    assert (first.label, list(first.labels), first.labels[0.004]) == ("a", RATES, "a")
    assert second.label == "b~lr=0.001"
    assert first.means == pytest.approx(dict.fromkeys(RATES, 0.6))
    assert len(first.seed_widths) == 2
    assert sensitivities(declared(0.1, 0.2), values, direction=Direction.HIGHER) == ()
    assert sensitivities(known, {}, direction=Direction.HIGHER) == ()


def test_the_sentence_names_the_best_rate_and_an_edge():
    by_rate = dict(zip(declared(*RATES), (0.1, 0.2, 0.5, 0.6, 0.3), strict=True))
    values = {label: {1: rate, 2: rate + 0.1} for label, rate in by_rate.items()}
    [found] = sensitivities(declared(*RATES), values, direction=Direction.HIGHER)
    said = sensitivity_sentence(found, RATE)
    assert "best 65.0% at lr 0.008; keeps 90 % of it from lr 0.00" in said
    assert "(single seeds: " in said
    assert "widen" not in said
    [found] = sensitivities(declared(*RATES[:4]), values, direction=Direction.HIGHER)
    assert sensitivity_sentence(found, RATE).endswith("the best lr is the largest tried: widen the range")


def by_rate(compare_json, made, folder, gains, *, rates=RATES, seeds=8):
    """Two conditions of which the second has these gains at its rates, twice those of the first."""
    labels = {f"grpo+none~lr={rate}": -0.2 for rate in rates}
    labels |= {f"maxrl+none~lr={2 * rate}": -0.2 + gain for rate, gain in zip(rates, gains, strict=True)}
    made.write_campaign(folder, labels, seeds=[*range(seeds)], steps=20)
    content = {label: {"training.lr": float(label.rpartition("=")[2]), "x": label[:5]} for label in labels}
    (folder / "campaign.json").write_text(json.dumps({"conditions": content}), encoding="utf-8")
    return compare_json(folder, "--baseline", "grpo+none~lr=0.002")["rate_by_rate"]


def test_a_gain_is_judged_at_the_same_multiple_of_each_rate(made, tmp_path, compare_json):
    [found] = by_rate(compare_json, made, tmp_path / "a", [0.3, 0.3, 0.3], rates=RATES[:3])
    assert (found["survives"], found["num_comparisons"]) == (True, 3)
    assert {*found["verdicts"].values()} == {"better"}
    assert [float(rate) for rate in found["differences"]] == [0.002, 0.004, 0.008]
    [found] = by_rate(compare_json, made, tmp_path / "b", [0.3, 0.3, 0.0], rates=RATES[:3])
    assert not found["survives"]
    assert [*found["verdicts"].values()] == ["better", "better", "cannot tell"]


def test_six_seeds_cannot_judge_single_rates_but_can_judge_all_of_them_together(made, tmp_path, compare_json):
    [found] = by_rate(compare_json, made, tmp_path / "a", [0.3, 0.3, 0.3], rates=RATES[:3], seeds=6)
    assert {*found["verdicts"].values()} == {"cannot tell"}
    assert found["survives"]


def test_compare_and_report_show_the_curve(made, tmp_path, compare_json, printed_json):
    labels = {f"grpo+none~lr={rate}": -0.3 * abs(math.log2(rate / 0.004)) / 4 for rate in RATES}
    folder = made.write_campaign(tmp_path / "c", labels, seeds=[1, 2, 3], steps=20)
    content = {"conditions": {label: {"training.lr": float(label.rpartition("=")[2])} for label in labels}}
    (folder / "campaign.json").write_text(json.dumps(content), encoding="utf-8")
    [found] = compare_json(folder)["sensitivity"]
    assert found["width"]["best"] in RATES[1:4]
    page = (tmp_path / "page.html").resolve()
    printed_json("report", folder, "--output", page)
    assert "Sensitivity to the learning rate" in page.read_text(encoding="utf-8")
