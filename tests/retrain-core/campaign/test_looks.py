"""Campaigns that look as planned and stop by themselves: what starts when, what is saved, and after a kill."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from retrain.campaign.load import Campaign, PlanTable, seal_plan
from retrain.campaign.looks import Look, StudyJudge
from retrain.campaign.report_lines import Lines
from retrain.campaign.schedule import Schedule
from retrain.kernel.errors import ConfigError, Problem
from tests.end_to_end.campaigns import manifest
from tests.kit.campaigns import Finishes, conditions

A, B, C = "grpo+toy_flat", "toy_raw+toy_flat", "toy_raw+toy_index"
FIVE = "seeds = [5, 4, 3, 2, 1]\nmax_steps = 4\nretries = 0\n"
PLAN = '[campaign.plan]\nhypothesis = "B is better"\nlooks = [2, 3, 5]\n'
LOADED: dict[str, Campaign] = {}  # frozen, and slow to load


def judged(*closed: Mapping[str, str]) -> Callable[[int, Sequence[str]], Look]:
    """A judge that closes at its nth look what the nth entry says."""
    left = list(closed)

    def judge(seeds: int, open_labels: Sequence[str]) -> Look:
        now = left.pop(0) if left else {}
        return Look(seeds=seeds, closed=dict(now), open={each: None for each in open_labels if each not in now})

    return judge


@pytest.fixture
def campaign(load_text: Callable[..., Campaign]) -> Campaign:
    """Three conditions, five seeds, looks after 2, 3 and 5."""
    if not LOADED:
        LOADED[PLAN] = load_text(FIVE + conditions(A, B, C), PLAN)
    return LOADED[PLAN]


@pytest.fixture
def make(campaign: Campaign, scheduled: Callable[..., Schedule]) -> Callable[..., Schedule]:
    """`make(launcher, judge=judged(...))`: the schedule of three conditions and five seeds."""
    return partial(scheduled, campaign)


def names(labels: Sequence[str], seeds: Sequence[int]) -> list[str]:
    return [f"{label}_s{seed}" for label in labels for seed in seeds]


def looked() -> list[tuple[int, list[str]]]:
    return [(look["seeds"], list(look["closed"])) for look in manifest().get("looks", ())]


def test_seeds_first_and_no_more_than_needed(make: Callable[..., Schedule], capsys: pytest.CaptureFixture[str]) -> None:
    launcher = Finishes()
    make(launcher, judge=judged({}, {B: "better"}, {C: "worse"})).run()
    assert launcher.started == names([A, B, C], [5, 4]) + names([A, B, C], [3]) + names([A, C], [2, 1])
    entries = {entry["run_name"]: entry["status"] for entry in manifest()["runs"]}
    assert [name for name, status in entries.items() if status == "not needed"] == names([B], [2, 1])
    assert looked() == [(2, []), (3, [B]), (5, [C])]
    assert f"look after 3 seeds: {B}: better; {C}: cannot tell" in capsys.readouterr().out


def test_it_stops_when_every_verdict_is_in(make: Callable[..., Schedule]) -> None:
    launcher = Finishes()
    make(launcher, judge=judged({B: "better", C: "futile"}), workers=4).run()
    assert sorted(launcher.started) == sorted(names([A, B, C], [5, 4]))
    assert [entry["status"] for entry in manifest()["runs"]].count("not needed") == 9


def test_a_null_campaign_runs_to_the_last_look(make: Callable[..., Schedule]) -> None:
    launcher = Finishes()
    make(launcher, judge=judged()).run()
    assert len(launcher.started) == 15
    assert looked() == [(2, []), (3, []), (5, [])]


class KillError(BaseException):
    """The end of a process."""


@pytest.mark.parametrize("is_recorded", [True, False])
def test_killed_at_a_look_it_continues_the_same_way(
    make: Callable[..., Schedule], monkeypatch: pytest.MonkeyPatch, is_recorded: bool
) -> None:
    """The runner dies while it looks, or right after the decision was recorded."""
    verdicts = ({B: "worse"}, {C: "better"})

    def dies(*_: Any) -> Any:
        if not is_recorded or "looks" in manifest():
            raise KillError

    with monkeypatch.context() as patch:
        patch.setattr(Lines, "say", dies if is_recorded else Lines.say)
        with pytest.raises(KillError):
            make(Finishes(), judge=judged(*verdicts) if is_recorded else dies).run()
    assert looked() == ([(2, [B])] if is_recorded else [])
    rest = Finishes()
    make(rest, judge=judged(*verdicts[is_recorded:])).run()
    assert rest.started == names([A, C], [3])
    assert looked() == [(2, [B]), (3, [C])]


def test_what_failed_for_good_does_not_hold_the_look_up(make: Callable[..., Schedule]) -> None:
    launcher = Finishes(f"{B}_s4")
    schedule = make(launcher, judge=judged({B: "better", C: "better"}))
    schedule.run()
    assert len(launcher.started) == 6
    assert list(schedule.failures) == [f"{B}_s4"]


def test_a_look_at_nothing_ends_the_campaign_and_can_be_taken_later(make: Callable[..., Schedule]) -> None:
    def nothing(seeds: int, open_labels: Sequence[str]) -> Look:
        raise ConfigError(Problem(what="no run can be compared"))

    launcher = Finishes()
    schedule = make(launcher, judge=nothing)
    schedule.run()
    assert schedule.cannot_look
    assert (len(launcher.started), looked()) == (6, [])
    make(launcher, judge=judged({B: "better", C: "better"})).run()
    assert len(launcher.started) == 6


def test_the_plan_writes_its_stop_rule(campaign: Campaign) -> None:
    assert campaign.table.plan is not None
    content = campaign.table.plan.content()
    assert (content["looks"], content["n_max"], content["spend"]) == ([2, 3, 5], 5, "pocock")
    assert content["stop_rule"].startswith("looks after 2, 3 and 5 seeds")
    assert PlanTable(**content).content() == content  # as `--resume` reads it back
    assert StudyJudge.of(campaign, Path("out")) is not None
    plain = PlanTable(hypothesis="h")
    assert set(plain.content()) == {"hypothesis", "primary_metric", "alpha", "stop_rule", "baseline", "direction"}
    assert PlanTable(**plain.model_dump()).content() == plain.content()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"looks": [2, 4]}, "plan.last-look"),
        ({"looks": [3, 2, 5]}, "ascending order"),
        ({"looks": [0, 5]}, "ascending order"),
        ({"looks": [2, 5], "n_max": 6}, "they must be equal"),
        ({"looks": [2, 5], "stop_rule": "when I am tired"}, "written by the plan"),
        ({"n_max": 5}, "no effect without looks"),
        ({"spend": "obrien_fleming"}, "no effect without looks"),
        ({"baseline": "nobody"}, "plan.unknown-baseline"),
    ],
)
def test_plans_that_contradict_themselves(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises((ValidationError, ConfigError)) as caught:
        seal_plan(PlanTable(hypothesis="h", **wrong), conditions=[A], seeds=[1, 2, 3, 4, 5], max_steps=1, written="")
    assert message in str(caught.value)
