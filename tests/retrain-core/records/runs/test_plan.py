"""Plans: sealed by the campaign, held to by the comparison."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from retrain.campaign.load import PlanTable, seal_plan
from retrain.kernel.errors import ConfigError
from retrain.records.files import seal_of
from tests.kit.edited import edit
from tests.kit.problems import codes_in

EFFECTS = {"grpo+none": 0.0, "maxrl+none": 0.1}
SEEDS = range(8)
Compare = Callable[..., dict[str, Any]]
NO_LEDGER = "planned, unverified"  # these campaigns are made up: no ledger saw them


def sealed(made: Any, **changes: Any) -> dict[str, Any]:
    place = {"conditions": list(EFFECTS), "seeds": list(SEEDS), "max_steps": 20, "written": made.WRITTEN}
    place |= {name: changes.pop(name) for name in list(changes) if name in place}
    return seal_plan(PlanTable(**({"hypothesis": "maxrl learns more"} | changes)), **place)


@pytest.fixture
def campaign(made: Any, tmp_path: Path) -> Callable[..., Path]:
    """`campaign(plan, steps=20, seeds=..., states=...)`: a folder with that plan in its manifest."""

    def make(plan: Any, *, seeds: Any = SEEDS, steps: int = 20, **more: Any) -> Path:
        folder: Path = made.write_campaign(tmp_path / "c", EFFECTS, seeds=seeds, steps=steps, plan=plan, **more)
        return folder

    return make


def reasons(content: dict[str, Any]) -> str:
    return "; ".join(content["exploratory"])


def test_a_campaign_analysed_as_planned_is_planned(
    made: Any, campaign: Any, compare_json: Compare, compare: Any
) -> None:
    plan = sealed(made, primary_metric="correct_rate:auc", alpha=0.1, baseline="maxrl+none", direction="lower")
    folder = campaign(plan)
    content = compare_json(folder)
    assert (content["standing"], content["exploratory"]) == (NO_LEDGER, [])
    assert (content["metric"], content["alpha"], content["baseline"], content["direction"]) == (
        *("correct_rate:auc", 0.1, "maxrl+none", "lower"),
    )
    assert content["plan"]["sha256"] == plan["sha256"]
    assert "As planned, but unverified, since no ledger here" in compare(folder).out


def test_without_a_plan_a_comparison_is_exploratory(campaign: Any, compare_json: Compare) -> None:
    content = compare_json(campaign(None))
    assert (content["standing"], content["plan"]) == ("exploratory", None)
    assert content["exploratory"] == ["no plan was registered before the runs ([campaign.plan])"]


DEPARTURES = {
    "the metric is correct_rate:final, planned was eval_correct_rate:final": ["--metric", "correct_rate"],
    "the alpha is 0.1, planned was 0.05": ["--alpha", "0.1"],
    "the baseline is maxrl+none, planned was grpo+none": ["--baseline", "maxrl+none"],
    "the better side is lower, planned was higher": ["--lower"],
    "all pairs are compared": ["--all-pairs"],
    "aligned on tokens": ["--align", "tokens"],
    "looked at after 10 steps, planned was after 20": ["--at", "10"],
    "final is taken over the last 3 steps": ["--last", "3"],
}


def test_every_option_that_departs_is_named_and_one_that_repeats_the_plan_is_not(
    made: Any, campaign: Any, compare_json: Compare
) -> None:
    folder = campaign(sealed(made), eval_every=5)
    for reason, options in DEPARTURES.items():
        (told,) = compare_json(folder, *options)["exploratory"]
        assert told.startswith(reason)
    same = ["--metric", "eval_correct_rate", "--alpha", "0.05", "--baseline", "grpo+none", "--at", "20"]
    assert compare_json(folder, *same)["standing"] == NO_LEDGER


def test_fewer_and_more_seeds_are_told(made: Any, campaign: Any, compare_json: Compare) -> None:
    folder = campaign(sealed(made), seeds=[*range(6), 100], states={("maxrl+none", 3): "failed"})
    told = reasons(compare_json(folder))
    assert "grpo+none lacks 2 of the 8 planned seeds" in told
    assert "maxrl+none lacks 3 of the 8 planned seeds" in told
    assert "grpo+none has 1 seeds that were not planned" in told


def test_conditions_that_differ_and_a_changed_plan_are_named(made: Any, campaign: Any, compare_json: Compare) -> None:
    plan = sealed(made, conditions=["grpo+none", "maxrl+gtpo"]) | {"hypothesis": "maxrl learns less"}
    content = compare_json(campaign(plan))
    for reason in ("maxrl+none was not planned", "maxrl+gtpo was planned and is missing", "hash does not match"):
        assert reason in reasons(content)
    assert content["plan"]["intact"] is False


WRITTEN = {"2026-03-01T12:00:06+00:00": True, "2027-01-01T00:00:00+02:00": True}
WRITTEN |= {"2026-03-01T12:00:05.987654+00:00": False}


@pytest.mark.parametrize(("written", "is_late"), WRITTEN.items())
def test_a_plan_written_after_the_second_in_which_the_first_run_began_is_named(
    made: Any, campaign: Any, compare_json: Compare, written: str, is_late: bool
) -> None:
    content = compare_json(campaign(sealed(made, written=written)))
    assert ("after the first run began" in reasons(content)) == is_late == (content["standing"] != NO_LEDGER)


@pytest.mark.parametrize("written", ["yesterday", "2026-03-01T12:00:00"])
def test_a_plan_without_a_time_proves_nothing(made: Any, campaign: Any, compare_json: Compare, written: str) -> None:
    told = reasons(compare_json(campaign(sealed(made, written=written))))
    assert "nothing shows that the plan was written before the first step" in told


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"sha256": 1, "seeds": "all", "conditions": [1], "alpha": "x", "max_steps": None, "direction": "up"},
        {"primary_metric": "::", "alpha": 7, "written": 5, "hypothesis": None},
        {"hypothesis": "\x1b[2J", "alpha": -1, "seeds": [True]},
    ],
)
def test_a_plan_that_makes_no_sense_is_not_followed(
    made: Any, campaign: Any, compare_json: Compare, compare: Any, plan: dict[str, Any]
) -> None:
    folder = campaign(None)
    edit(folder / "manifest.json", lambda manifest: manifest.update(plan=plan))
    content = compare_json(folder)
    assert (content["standing"], content["alpha"], content["direction"]) == ("exploratory", 0.05, "higher")
    assert "\x1b" not in compare(folder).out


def test_a_planned_metric_or_baseline_that_is_not_there_is_an_error(made: Any, campaign: Any, compare: Any) -> None:
    result = compare(campaign(sealed(made, primary_metric="correct_rat:auc")))
    assert result.code == 2
    assert codes_in(result.err) == ["compare.unknown-metric"]
    assert "did you mean 'correct_rate'?" in result.err


@settings(max_examples=25)
@given(st.dictionaries(st.text(), st.one_of(st.text(), st.integers(), st.floats(0, 1), st.lists(st.text()))))
def test_both_rooms_hash_alike(content: dict[str, Any]) -> None:
    digest = seal_of(content)
    assert digest == seal_of(dict(reversed(content.items())))
    assert digest == seal_of(json.loads(json.dumps(content | {"sha256": digest})))


def test_sealing() -> None:
    table = PlanTable(hypothesis="h", primary_metric="correct_rate")
    plan = seal_plan(table, conditions=["a", "b"], seeds=[1], max_steps=5, written="now")
    assert (plan["primary_metric"], plan["baseline"], plan["seeds"]) == ("correct_rate:final", "a", [1])
    assert plan["sha256"] == seal_of(plan)
    assert plan["sha256"] != seal_plan(table, conditions=["a"], seeds=[1], max_steps=5, written="now")["sha256"]
    with pytest.raises(ConfigError, match="'c' is not a condition of this campaign"):
        seal_plan(PlanTable(hypothesis="h", baseline="c"), conditions=["a"], seeds=[1], max_steps=5, written="now")


REFUSED = [{"hypothesis": each} for each in (None, "", " \t")] + [{"stop_rule": ""}, {"unknown": 1}]
REFUSED += [{"primary_metric": "x:mean"}, {"primary_metric": ":final"}, {"alpha": 0.0}, {"alpha": 0.5}]


@pytest.mark.parametrize("wrong", [*REFUSED, {"direction": "up"}])
def test_plans_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PlanTable(**{"hypothesis": "h", **wrong})
