"""Campaigns that look as planned and stop by themselves: what starts when, what is saved, and after a kill."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from retrain.api import Job
from retrain.campaign import schedule as module
from retrain.campaign.load import Campaign, PlanTable, seal_plan
from retrain.campaign.looks import Look, PlannedLooks, StudyJudge
from retrain.campaign.manifest import CampaignRecord, Manifest, new_content
from retrain.campaign.planned import plan_runs
from retrain.campaign.report_lines import Lines
from retrain.campaign.schedule import FollowUps, Schedule, Stops
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins

A, B, C = "grpo+toy_flat", "toy_raw+toy_flat", "toy_raw+toy_index"
CONDITIONS = "".join(
    f'[[campaign.conditions]]\nadvantage_mode = "{mode}"\ntransform_mode = "{transform}"\n'
    for mode, _, transform in (label.partition("+") for label in (A, B, C))
)
FIVE = "seeds = [5, 4, 3, 2, 1]\nmax_steps = 4\nretries = 0\n"
PLAN = '[campaign.plan]\nhypothesis = "B is better"\nlooks = [2, 3, 5]\n'
RECORD = {"seed": 1, "started": "now", "config": {}}
LOADED: dict[str, Campaign] = {}  # frozen, and slow to load


class Ending:
    """A launcher whose runs end at once, those in `failing` with an error."""

    def __init__(self, *failing: str) -> None:
        self.failing, self.started = failing, list[str]()

    def start(self, job: Job) -> Any:
        self.started.append(job.name)
        fails = job.name in self.failing
        (job.folder / "run.json").write_text(json.dumps(RECORD | {"status": "failed" if fails else "done"}))
        (job.folder / "adapter/final").mkdir(parents=True)
        return type("Ended", (), {"pid": None, "poll": lambda self: 1 if fails else 0})()


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
        LOADED[PLAN] = load_text(FIVE + CONDITIONS, PLAN)
    return LOADED[PLAN]


@pytest.fixture
def make(campaign: Campaign, toy_plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Schedule]:
    """`make(launcher, judge)`: the schedule of three conditions and five seeds in `out`, continued if it was there."""
    monkeypatch.setattr(module, "POLL_S", 0.0)

    def build(launcher: Any, judge: Any, *, workers: int = 1) -> Schedule:
        folder = Path("out")
        folder.mkdir(exist_ok=True)
        runs = plan_runs(campaign, folder)
        file = folder / "manifest.json"
        content = json.loads(file.read_text()) if file.exists() else new_content(campaign, runs, datetime.now(UTC))
        lines = Lines(len(runs), parallel=workers > 1)
        return Schedule(
            campaign,
            runs,
            workers=workers,
            throttle_dir=None,
            manifest=Manifest(folder, content),
            launcher=launcher,
            lines=lines,
            follow_ups=FollowUps(campaign, toy_plugins, folder, frozenset()),
            stops=Stops(),
            record=CampaignRecord(folder, lines),
            looks=PlannedLooks(campaign, judge, content.get("looks", ())),
        )

    return build


def names(labels: Sequence[str], seeds: Sequence[int]) -> list[str]:
    return [f"{label}_s{seed}" for label in labels for seed in seeds]


def manifest() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path("out/manifest.json").read_text())
    return content


def test_seeds_first_and_no_more_than_needed(make: Callable[..., Schedule], capsys: pytest.CaptureFixture[str]) -> None:
    launcher = Ending()
    make(launcher, judged({}, {B: "better"}, {C: "worse"})).run()
    assert launcher.started == names([A, B, C], [5, 4]) + names([A, B, C], [3]) + names([A, C], [2, 1])
    entries = {entry["run_name"]: entry["status"] for entry in manifest()["runs"]}
    assert [name for name, status in entries.items() if status == "not needed"] == names([B], [2, 1])
    assert [look["seeds"] for look in manifest()["looks"]] == [2, 3, 5]
    assert f"look after 3 seeds: {B}: better; {C}: cannot tell" in capsys.readouterr().out


def test_it_stops_when_every_verdict_is_in(make: Callable[..., Schedule]) -> None:
    launcher = Ending()
    make(launcher, judged({B: "better", C: "futile"}), workers=4).run()
    assert sorted(launcher.started) == sorted(names([A, B, C], [5, 4]))
    assert [entry["status"] for entry in manifest()["runs"]].count("not needed") == 9


def test_a_null_campaign_runs_to_the_last_look(make: Callable[..., Schedule]) -> None:
    launcher = Ending()
    make(launcher, judged()).run()
    assert len(launcher.started) == 15
    assert [look["seeds"] for look in manifest()["looks"]] == [2, 3, 5]


@pytest.mark.parametrize("is_recorded", [True, False])
def test_killed_at_a_look_it_goes_on_the_same_way(make: Callable[..., Schedule], is_recorded: bool) -> None:
    """The runner dies while it looks, or right after what it saw was recorded."""

    class KillError(BaseException):
        pass

    verdicts = ({B: "worse"}, {C: "better"})
    first = make(Ending(), judged(*verdicts))
    if is_recorded:
        first._lines.say = lambda *_: (_ for _ in ()).throw(KillError) if "looks" in manifest() else None  # type: ignore[method-assign]
    else:

        def dies(seeds: int, open_labels: Sequence[str]) -> Look:
            raise KillError

        first._looks._judge = dies  # type: ignore[union-attr]
    with pytest.raises(KillError):
        first.run()
    assert ("looks" in manifest()) == is_recorded
    rest = Ending()
    make(rest, judged(*verdicts[is_recorded:])).run()
    assert rest.started == names([A, C], [3])
    assert [(look["seeds"], list(look["closed"])) for look in manifest()["looks"]] == [(2, [B]), (3, [C])]


def test_what_failed_for_good_does_not_hold_the_look_up(make: Callable[..., Schedule]) -> None:
    launcher = Ending(f"{B}_s4")
    schedule = make(launcher, judged({B: "better", C: "better"}))
    schedule.run()
    assert len(launcher.started) == 6
    assert list(schedule.failures) == [f"{B}_s4"]


def test_a_look_at_nothing_ends_the_campaign_and_can_be_taken_later(make: Callable[..., Schedule]) -> None:
    def nothing(seeds: int, open_labels: Sequence[str]) -> Look:
        raise ConfigError(Problem(what="no run can be compared"))

    launcher = Ending()
    schedule = make(launcher, nothing)
    schedule.run()
    assert schedule.cannot_look
    assert (len(launcher.started), manifest().get("looks")) == (6, None)
    make(launcher, judged({B: "better", C: "better"})).run()
    assert len(launcher.started) == 6


def test_the_plan_writes_its_stop_rule(campaign: Campaign) -> None:
    assert campaign.table.plan is not None
    content = campaign.table.plan.content()
    assert (content["looks"], content["n_max"], content["spend"]) == ([2, 3, 5], 5, "pocock")
    assert content["stop_rule"].startswith("looks after 2, 3 and 5 seeds")
    assert PlanTable(**content).content() == content  # as `--resume` reads it back
    assert StudyJudge.of(campaign, Path("out")) is not None


def test_a_plan_without_looks_is_sealed_as_ever() -> None:
    plan = PlanTable(hypothesis="h")
    assert set(plan.content()) == {"hypothesis", "primary_metric", "alpha", "stop_rule", "baseline", "direction"}
    assert PlanTable(**plan.model_dump()).content() == plan.content()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"looks": [2, 4]}, "the last look is after 4 seeds, and [campaign] seeds has 5"),
        ({"looks": [3, 2, 5]}, "ascending order"),
        ({"looks": [0, 5]}, "ascending order"),
        ({"looks": [2, 5], "n_max": 6}, "they must be equal"),
        ({"looks": [2, 5], "stop_rule": "when I am tired"}, "written by the plan"),
        ({"n_max": 5}, "no effect without looks"),
        ({"spend": "obrien_fleming"}, "no effect without looks"),
    ],
)
def test_plans_that_contradict_themselves(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises((ValidationError, ConfigError)) as caught:
        seal_plan(PlanTable(hypothesis="h", **wrong), conditions=[A], seeds=[1, 2, 3, 4, 5], max_steps=1, written="")
    assert message in str(caught.value)
