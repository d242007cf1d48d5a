"""Which test decides about a campaign: by its plan, by how it grew, and by earlier looks on record."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.campaign.load import PlanTable, seal_plan
from retrain.campaign.looks import StudyJudge
from retrain.records.runs.campaign_status import read_campaign
from retrain.records.runs.registered import Spend
from retrain.records.runs.source import find_runs
from retrain.verdicts.stats.sequential import AnytimeTest, conditional_powers
from retrain.verdicts.study.comparison import Comparison
from retrain.verdicts.study.study import Options, study_of
from tests.kit.edited import edit

A, B = "grpo+none", "maxrl+none"
SEEDS = (11, 3, 7, 1, 8, 2, 9, 4, 6, 5)
Made = Callable[..., Path]


@pytest.fixture
def campaign(made: Any, tmp_path: Path) -> Made:
    """`campaign(looks, seeds, effect=0.1, saved=0, grown=(), ...)`: its folder; the last `saved` seeds did not run."""

    def make(
        looks: Sequence[int], seeds: Sequence[int] = SEEDS, *, effect: float = 0.1, saved: int = 0, **more: Any
    ) -> Path:
        grown, planned = list(more.pop("grown", ())), more.pop("planned", SEEDS)
        table = PlanTable(hypothesis="h", primary_metric="correct_rate:final", looks=list(looks))
        plan = seal_plan(table, conditions=[A, B], seeds=planned, max_steps=10, written=made.WRITTEN) if looks else None
        ran = list(seeds)[: len(seeds) - saved]
        folder: Path = made.write_campaign(
            tmp_path / "c", {A: 0.0, B: effect}, seeds=ran, steps=10, plan=plan, eval_every=0, **more
        )

        def add(content: dict[str, Any]) -> None:
            for condition, seed in product((A, B), list(seeds)[len(ran) :]):
                entry = {"condition": condition, "seed": seed, "run_name": f"{condition}_s{seed}", "returncode": None}
                content["runs"].append(entry | {"status": "not needed", "log_dir": ""})
            content |= {"grown": [{"time": "now", "seeds": grown, "conditions": []}]} if grown else {}

        edit(folder / "manifest.json", add)
        return folder

    return make


def judged(folder: Path, earlier: Sequence[int] = ()) -> Comparison:
    (comparison,) = study_of(find_runs([folder]), Options(), earlier=earlier).comparisons
    assert comparison.looks
    return comparison


def design(folder: Path, earlier: Sequence[int] = ()) -> str:
    looks = judged(folder, earlier).looks
    assert looks
    return looks.design.value


def test_planned_looks_decide_and_what_they_saved_is_no_loss(campaign: Made) -> None:
    folder = campaign([6, 8, 10], saved=4)
    study = study_of(find_runs([folder]), Options())
    (found,) = study.comparisons
    assert (found.verdict.value, found.seeds) == ("better", SEEDS[:6])
    assert found.looks
    assert (found.looks.design.value, found.looks.taken, found.looks.decided_after) == ("planned looks", (6,), 6)
    assert found.looks.next_look == 8
    assert (study.exploratory, study.left_out, study.conditions[0].num_runs) == ((), (), 6)
    status = read_campaign(folder)
    assert status is not None
    assert (status.state, status.num_completed, len(status.runs)) == ("done", 12, 20)


def test_between_looks_the_last_look_counts(campaign: Made) -> None:
    """A seventh seed is no look, and a run that goes on holds its look up, whatever the others say."""
    folder = campaign([6, 8, 10], SEEDS[:7])
    found = judged(folder)
    assert found.looks
    assert found.looks.taken == (6,)
    assert (found.p, len(found.seeds)) == (pytest.approx(2 / 2**6 / math.log1p((math.e - 1) * 0.6), rel=1e-3), 7)


def test_an_open_entry_holds_the_look_up_and_a_lost_run_does_not(campaign: Made) -> None:
    folder = campaign([6, 8, 10], saved=4, states={(B, 3): "running"})
    lost = judged(folder)
    assert lost.looks
    # The run's process is gone, and no manifest says that it failed for good: it ended.
    assert (lost.looks.taken, len(lost.seeds)) == ((6,), 5)

    def open_one(content: dict[str, Any]) -> None:
        for entry in content["runs"]:
            entry.setdefault("status", "done" if (entry["condition"], entry["seed"]) != (B, 3) else "queued")

    edit(folder / "manifest.json", open_one)
    found = judged(folder)
    assert found.looks
    assert (found.looks.taken, found.p, found.verdict.value) == ((), 1.0, "cannot tell")


def test_added_seeds_go_through_the_test_for_any_time(campaign: Made) -> None:
    folder = campaign([], grown=SEEDS[6:])
    found = judged(folder)
    assert found.looks
    assert found.looks.reason == "4 seeds were added without planned looks"
    values = study_of(find_runs([folder]), Options()).conditions
    rates = [each.estimates["correct_rate:final"].values for each in values]
    diffs_N = np.array([rates[1][seed] - rates[0][seed] for seed in SEEDS])
    assert found.p == pytest.approx(AnytimeTest(diffs_N=diffs_N).p)
    assert found.interval
    assert (found.interval[0] > 0.0) == (found.verdict.value == "better")


def test_seeds_listed_first_but_added_later_come_last(campaign: Made) -> None:
    found = judged(campaign([], grown=SEEDS[:2]))
    assert found.seeds == (*SEEDS[2:], *SEEDS[:2])


@pytest.mark.parametrize("is_edited", [False, True])
def test_seeds_beyond_planned_looks_or_an_edited_plan_lose_the_plan(campaign: Made, is_edited: bool) -> None:
    if is_edited:
        folder = campaign([6, 8, 10])
        edit(folder / "manifest.json", lambda content: content["plan"].update(spend="obrien_fleming"))
    else:
        folder = campaign([6, 8], planned=SEEDS[:8], grown=SEEDS[8:])
    assert design(folder) == "anytime"


EARLIER = [((), "fixed"), ((10, 10), "fixed"), ((6, 10), "anytime"), ((0,), "fixed")]


@pytest.mark.parametrize(("earlier", "wanted"), EARLIER)
def test_an_earlier_look_at_fewer_seeds_is_paid_for(campaign: Made, earlier: Sequence[int], wanted: str) -> None:
    assert design(campaign([]), earlier) == wanted


def test_earlier_looks_are_listed_once_in_order(campaign: Made) -> None:
    looks = judged(campaign([]), earlier=(8, 1, 8)).looks
    assert looks
    assert (looks.taken, looks.reason) == ((1, 8), "an earlier look at 1, 8 seeds is on record")


def test_looking_before_planned_looks_costs_nothing(campaign: Made) -> None:
    assert design(campaign([6, 8, 10]), earlier=[4, 5]) == "planned looks"


def test_a_campaign_looks_as_compare_does_and_twice_the_same(campaign: Made, tmp_path: Path) -> None:
    folder = campaign([6, 8, 10], saved=4, states={(B, 7): "failed"})
    judge = StudyJudge(folder=folder, seeds=SEEDS, looks=(6, 8, 10), spend="pocock")
    first = judge(6, [B])
    assert (first.closed, list(first.open), first.lost) == ({}, [B], (f"{B}_s7",))  # five pairs are too few
    assert first.open[B] is not None
    assert first.open[B] > 0.9
    ledger = (tmp_path / "ledger.jsonl").read_bytes()
    assert judge(6, [B]) == first
    assert (tmp_path / "ledger.jsonl").read_bytes() == ledger  # the same look is on record once


def test_hopeless_and_certain_futures() -> None:
    flat_N, steep_N = np.array([1.0, -1.1, 0.9, -1.0, 1.05, -0.9]), np.array([1.0, 1.1, 0.9, 1.2, 0.8, 1.0])
    chance = {"counts_K": [6], "looks": [6, 8, 10], "spend": Spend.POCOCK, "alpha": 0.05}
    hopeless, certain = (conditional_powers(diffs_N, **chance) for diffs_N in (flat_N, steep_N))  # type: ignore[arg-type]
    assert hopeless == conditional_powers(flat_N, **chance)  # type: ignore[arg-type]
    assert hopeless is not None
    assert certain is not None
    assert (sum(hopeless) < 0.05, sum(certain)) == (True, 1.0)
    assert conditional_powers(np.zeros(6), **chance) is None  # type: ignore[arg-type]
    assert conditional_powers(steep_N[:2], **{**chance, "counts_K": [2]}) is None  # type: ignore[arg-type]


def test_a_condition_that_only_its_control_keeps_from_a_verdict_is_futile(made: Any, tmp_path: Path) -> None:
    """Against its baseline the chance would be near 1; "better" needs the control to be beaten, too."""
    control = f"{B}+random_reward"
    table = PlanTable(hypothesis="h", primary_metric="correct_rate:final", looks=[7, 10])
    plan = seal_plan(table, conditions=[A, B, control], seeds=SEEDS, max_steps=10, written=made.WRITTEN)
    effects = {A: 0.0, B: 0.2, control: 0.25}
    folder = made.write_campaign(tmp_path / "c", effects, seeds=SEEDS[:7], steps=10, plan=plan, eval_every=0)
    judge = StudyJudge(folder=folder, seeds=SEEDS, looks=(7, 10), spend="pocock")
    look = judge(7, [B])
    assert look.closed[B].startswith("futile")
