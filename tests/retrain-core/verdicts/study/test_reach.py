"""What a number of seeds can reach, held against the tests that decide; planned looks, and earlier ones paid for."""

import math
import shutil
from datetime import UTC, datetime
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.campaign.load import PlanTable, seal_plan
from retrain.campaign.looks import StudyJudge
from retrain.records.runs.campaign_status import read_campaign
from retrain.records.runs.curves import Direction
from retrain.records.runs.registered import Spend
from retrain.records.runs.source import Candidate, Source, find_runs
from retrain.verdicts.stats.flip import EXACT_EXCHANGES, EXACT_SEEDS, FlipTest, patterns_for
from retrain.verdicts.stats.sequential import AnytimeTest, SequentialFlip, conditional_powers
from retrain.verdicts.study.comparison import Design, Verdict
from retrain.verdicts.study.judge import judge
from retrain.verdicts.study.looks import chosen_looks, reach_of, reach_sentences
from retrain.verdicts.study.study import Options, study_of
from tests.kit.edited import edit
from tests.kit.made_runs import WRITTEN, write_campaign
from tests.kit.pairings import pairing

FIXED, UNPAIRED, PLANNED, ANYTIME = Design.FIXED, Design.UNPAIRED, Design.PLANNED, Design.ANYTIME


def clearest(design, seeds, comparisons, alpha, looks):
    """True if a family of clear differences, equal in all seeds, is found at all."""

    def tested(_, diffs_N):
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
def test_a_plan_can_decide_exactly_if_the_clearest_result_is_a_verdict(design, seeds, family):
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
        (FIXED, 4, 1, (), ["plan at least 6", 'test = "unpaired"']),
        (FIXED, 6, 4, (), ["0.031 (0.12 after Holm", "plan at least 8", 'test = "unpaired"']),
        (ANYTIME, 6, 1, (), ["plan at least 7"]),
        (UNPAIRED, 3, 1, (), ["smallest possible p 0.1;", "plan at least 4"]),
        (PLANNED, 4, 1, (3, 4), ["plan at least 6"]),
        (PLANNED, 20, 4, (7, 9, 20), ["the look after 7 seeds", "after 9 or more"]),
    ],
)
def test_the_warning_says_what_would_reach_a_verdict(design, seeds, family, looks, said):
    [line] = reach_sentences(reach_of(design, num_seeds=seeds, comparisons=family, alpha=0.05, looks=looks))
    assert all(part in line for part in said), line
    assert ("unpaired" in line) == any("unpaired" in part for part in said)


@pytest.mark.parametrize(
    ("design", "seeds", "smallest"),
    [
        *((each, seeds, 1.0) for each in (FIXED, UNPAIRED, ANYTIME) for seeds in (0, 1)),
        *(
            (FIXED, 2, 0.5),
            (FIXED, EXACT_SEEDS, 2.0 ** (1 - EXACT_SEEDS)),
            (FIXED, EXACT_SEEDS + 1, 1 / patterns_for(1, 0.05)),
        ),
        *((UNPAIRED, 2, 1 / 3), (UNPAIRED, EXACT_EXCHANGES, 2 / math.comb(2 * EXACT_EXCHANGES, EXACT_EXCHANGES))),
        *((each, 20, 1 / patterns_for(1, 0.05)) for each in (FIXED, UNPAIRED)),
    ],
)
def test_the_smallest_p_is_one_pattern_of_all_or_of_the_drawn_ones(design, seeds, smallest):
    reach = reach_of(design, num_seeds=seeds, comparisons=1, alpha=0.05)
    assert reach.smallest_p == pytest.approx(smallest, rel=1e-12)


@settings(max_examples=40)
@given(st.integers(2, 5), st.data())
def test_the_unpaired_test_counts_every_deal(size, data):
    values = st.lists(st.integers(-20, 20), min_size=size, max_size=size)
    left_N, right_N = (np.array(data.draw(values), dtype=float) / 8 for _ in range(2))
    both, observed = np.concatenate([left_N, right_N]), abs(right_N.mean() - left_N.mean())
    deals = [both[list(chosen)].sum() for chosen in combinations(range(2 * size), size)]
    far = sum(abs(both.sum() - 2 * each) / size >= observed - 1e-12 for each in deals)
    test = FlipTest.of_exchanges(left_N, right_N)
    assert test.p == pytest.approx(far / len(deals))
    low, high = test.interval(0.9)
    assert (low <= 0.0 <= high) == (test.p > 0.1)


def test_drawn_deals_agree_with_all_of_them(monkeypatch):
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


def test_three_seeds_give_an_estimate_and_no_verdict(tmp_path, compare, compare_json):
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


def test_an_unfinished_campaign_is_warned_of_before_its_last_seed(tmp_path, compare):
    states = {("b+none", 2): "running", ("b+none", 1): "running"}
    effects = {"a+none": 0.0, "b+none": 0.2}
    folder = write_campaign(tmp_path / "c", effects, seeds=range(3), steps=20, states=states)
    assert "no verdict is possible. 3 seeds: smallest possible p 0.25; plan at least 6" in compare(folder).out


def test_a_planned_unpaired_test_decides_with_four_seeds(tmp_path, compare_json):
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


def test_a_verdict_that_lost_runs_decide_says_so_in_its_first_words(tmp_path, compare_json):
    effects, lost = {"a+none": 0.0, "b+none": 0.1}, {("b+none", seed): "failed" for seed in (6, 7, 8)}
    folder = write_campaign(tmp_path / "c", effects, seeds=range(9), steps=20, states=lost, spread=0.04)
    data = compare_json(folder)
    [found] = data["comparisons"]
    assert not found["lost"]["survives"]
    assert found["line"].startswith("better, unless lost runs were bad: ")
    assert data["answer"].startswith("b+none is better than a+none, unless lost runs were bad: ")


A, B = "grpo+none", "maxrl+none"
SEEDS = (11, 3, 7, 1, 8, 2, 9, 4, 6, 5)


@pytest.fixture
def campaign(made, tmp_path):
    """`campaign(looks, seeds, effect=0.1, saved=0, grown=(), ...)`: its folder; the last `saved` seeds did not run."""

    def make(looks, seeds=SEEDS, *, effect=0.1, saved=0, **more):
        grown, planned = list(more.pop("grown", ())), more.pop("planned", SEEDS)
        table = PlanTable(hypothesis="h", primary_metric="correct_rate:final", looks=list(looks))
        plan = seal_plan(table, conditions=[A, B], seeds=planned, max_steps=10, written=made.WRITTEN) if looks else None
        ran = list(seeds)[: len(seeds) - saved]
        folder = made.write_campaign(
            tmp_path / "c", {A: 0.0, B: effect}, seeds=ran, steps=10, plan=plan, eval_every=0, **more
        )

        def add(content):
            for condition, seed in product((A, B), list(seeds)[len(ran) :]):
                entry = {"condition": condition, "seed": seed, "run_name": f"{condition}_s{seed}", "returncode": None}
                content["runs"].append(entry | {"status": "not needed", "log_dir": ""})
            content |= {"grown": [{"time": "now", "seeds": grown, "conditions": []}]} if grown else {}

        edit(folder / "manifest.json", add)
        return folder

    return make


def judged(folder, earlier=()):
    (comparison,) = study_of(find_runs([folder]), Options(), earlier=earlier).comparisons
    return comparison


def design(folder, earlier=()):
    return judged(folder, earlier).looks.design.value


def test_planned_looks_decide_and_what_they_saved_is_no_loss(campaign):
    folder = campaign([6, 8, 10], saved=4)
    study = study_of(find_runs([folder]), Options())
    (found,) = study.comparisons
    assert (found.verdict.value, found.seeds) == ("better", SEEDS[:6])
    assert (found.looks.design.value, found.looks.taken, found.looks.decided_after) == ("planned looks", (6,), 6)
    assert found.looks.next_look == 8
    assert (study.exploratory, study.left_out, study.conditions[0].num_runs) == ((), (), 6)
    status = read_campaign(folder)
    assert (status.state, status.num_completed, len(status.runs)) == ("done", 12, 20)


def test_between_looks_the_last_look_counts(campaign):
    # A seventh seed is no look, and a run that goes on holds its look up, whatever the others say.
    folder = campaign([6, 8, 10], SEEDS[:7])
    found = judged(folder)
    assert found.looks.taken == (6,)
    assert (found.p, len(found.seeds)) == (pytest.approx(2 / 2**6 / math.log1p((math.e - 1) * 0.6), rel=1e-3), 7)
    shutil.rmtree(folder)
    open_one = judged(campaign([6, 8, 10], SEEDS[:7], effect=0.0))
    assert (open_one.verdict.value, open_one.looks.decided_after, open_one.looks.next_look) == ("cannot tell", None, 8)


def test_seeds_come_in_the_order_of_their_first_runs():
    times = {1: (3, 4), 2: (2, 9), 3: (1, None), 4: (5, 5)}
    runs = [
        Candidate(
            name="", condition=label, seed=seed, folder=None, state="done",
            started=hour and datetime(2026, 3, 1, hour, tzinfo=UTC),
        )
        for seed, hours in times.items()
        for label, hour in zip((A, B), hours, strict=True)
    ]  # fmt: skip
    source = Source(campaign=None, conditions=(A, B), candidates=tuple(runs), plan=None, added_seeds=(9, 3))
    assert chosen_looks(source).seeds == (2, 1, 4, 3)


def test_an_open_entry_holds_the_look_up_and_a_lost_run_does_not(campaign):
    folder = campaign([6, 8, 10], saved=4, states={(B, 3): "running"})
    lost = judged(folder)
    # The run's process is gone, and no manifest says that it failed for good: it ended.
    assert (lost.looks.taken, len(lost.seeds)) == ((6,), 5)

    def open_one(content):
        for entry in content["runs"]:
            entry.setdefault("status", "done" if (entry["condition"], entry["seed"]) != (B, 3) else "queued")

    edit(folder / "manifest.json", open_one)
    found = judged(folder)
    assert (found.looks.taken, found.p, found.verdict.value) == ((), 1.0, "cannot tell")


def test_added_seeds_go_through_the_test_for_any_time(campaign):
    folder = campaign([], grown=SEEDS[6:])
    found = judged(folder)
    assert found.looks.reason == "4 seeds were added without planned looks"
    values = study_of(find_runs([folder]), Options()).conditions
    rates = [each.estimates["correct_rate:final"].values for each in values]
    diffs_N = np.array([rates[1][seed] - rates[0][seed] for seed in SEEDS])
    assert found.p == pytest.approx(AnytimeTest(diffs_N=diffs_N).p)
    assert (found.interval[0] > 0.0) == (found.verdict.value == "better")
    shutil.rmtree(folder)  # seeds that are listed first but were added later come last
    assert judged(campaign([], grown=SEEDS[:2])).seeds == (*SEEDS[2:], *SEEDS[:2])


@pytest.mark.parametrize("is_edited", [False, True])
def test_seeds_beyond_planned_looks_or_an_edited_plan_lose_the_plan(campaign, is_edited):
    if is_edited:
        folder = campaign([6, 8, 10])
        edit(folder / "manifest.json", lambda content: content["plan"].update(spend="obrien_fleming"))
    else:
        folder = campaign([6, 8], planned=SEEDS[:8], grown=SEEDS[8:])
    assert design(folder) == "anytime"


def test_an_earlier_look_at_fewer_seeds_is_paid_for_unless_looks_are_planned(campaign):
    folder = campaign([])
    designs = {(): "fixed", (10, 10): "fixed", (6, 10): "anytime", (0,): "fixed"}
    assert {earlier: design(folder, earlier) for earlier in designs} == designs
    looks = judged(folder, earlier=(8, 1, 8)).looks
    assert (looks.taken, looks.reason) == ((1, 8), "an earlier look at 1, 8 seeds is on record")
    shutil.rmtree(folder)
    assert design(campaign([6, 8, 10]), earlier=[4, 5]) == "planned looks"


def test_a_campaign_looks_as_compare_does_and_twice_the_same(campaign, tmp_path):
    folder = campaign([6, 8, 10], saved=4, states={(B, 7): "failed"})
    judge = StudyJudge(folder=folder, seeds=SEEDS, looks=(6, 8, 10), spend="pocock")
    first = judge(6, [B])
    assert (first.closed, list(first.open), first.lost) == ({}, [B], (f"{B}_s7",))  # five pairs are too few
    assert first.open[B] > 0.9
    ledger = (tmp_path / "ledger.jsonl").read_bytes()
    assert judge(6, [B]) == first
    assert (tmp_path / "ledger.jsonl").read_bytes() == ledger  # the same look is on record once


def test_hopeless_and_certain_futures():
    flat_N, steep_N = np.array([1.0, -1.1, 0.9, -1.0, 1.05, -0.9]), np.array([1.0, 1.1, 0.9, 1.2, 0.8, 1.0])
    chance = {"counts_K": [6], "looks": [6, 8, 10], "spend": Spend.POCOCK, "alpha": 0.05}
    hopeless, certain = (conditional_powers(diffs_N, **chance) for diffs_N in (flat_N, steep_N))
    assert hopeless == conditional_powers(flat_N, **chance)
    assert (sum(hopeless) < 0.05, sum(certain)) == (True, 1.0)
    assert conditional_powers(np.zeros(6), **chance) is None
    assert conditional_powers(steep_N[:2], **{**chance, "counts_K": [2]}) is None


def test_a_condition_that_only_its_control_keeps_from_a_verdict_is_futile(made, tmp_path):
    """Against its baseline the chance would be near 1; "better" needs the control to be beaten, too."""
    control = f"{B}+random_reward"
    table = PlanTable(hypothesis="h", primary_metric="correct_rate:final", looks=[7, 10])
    plan = seal_plan(table, conditions=[A, B, control], seeds=SEEDS, max_steps=10, written=made.WRITTEN)
    effects = {A: 0.0, B: 0.2, control: 0.25}
    folder = made.write_campaign(tmp_path / "c", effects, seeds=SEEDS[:7], steps=10, plan=plan, eval_every=0)
    judge = StudyJudge(folder=folder, seeds=SEEDS, looks=(7, 10), spend="pocock")
    look = judge(7, [B])
    assert look.closed[B].startswith("futile")
