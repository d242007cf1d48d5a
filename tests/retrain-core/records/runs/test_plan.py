"""Plans: sealed by the campaign, held to by the comparison; and what else differs between compared runs."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from retrain.campaign.load import PlanTable, seal_plan
from retrain.kernel.errors import ConfigError
from retrain.records.files import seal_of
from retrain.records.identity.collect import Identity
from retrain.records.identity.copies import write_inputs
from retrain.records.identity.hashing import Budget, PluginFiles, hash_file
from tests.kit.edited import edit
from tests.kit.problems import codes_in

EFFECTS = {"grpo+none": 0.0, "maxrl+none": 0.1}
SEEDS = range(8)
NO_LEDGER = "planned, unverified"  # these campaigns are made up: no ledger saw them


def sealed(made, **changes):
    place = {"conditions": list(EFFECTS), "seeds": list(SEEDS), "max_steps": 20, "written": made.WRITTEN}
    place |= {name: changes.pop(name) for name in list(changes) if name in place}
    return seal_plan(PlanTable(**({"hypothesis": "maxrl learns more"} | changes)), **place)


@pytest.fixture
def campaign(made, tmp_path):
    """`campaign(plan, steps=20, seeds=..., states=...)`: a folder with that plan in its manifest."""

    def make(plan, *, seeds=SEEDS, steps=20, **more):
        return made.write_campaign(tmp_path / "c", EFFECTS, seeds=seeds, steps=steps, plan=plan, **more)

    return make


def reasons(content):
    return "; ".join(content["exploratory"])


def test_a_campaign_analysed_as_planned_is_planned(made, campaign, compare_json, compare):
    plan = sealed(made, primary_metric="correct_rate:auc", alpha=0.1, baseline="maxrl+none", direction="lower")
    folder = campaign(plan)
    content = compare_json(folder)
    assert (content["standing"], content["exploratory"]) == (NO_LEDGER, [])
    assert (content["metric"], content["alpha"], content["baseline"], content["direction"]) == (
        *("correct_rate:auc", 0.1, "maxrl+none", "lower"),
    )
    assert content["plan"]["sha256"] == plan["sha256"]
    assert "As planned, but unverified, since no ledger here" in compare(folder).out


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


def test_every_option_that_departs_is_named_and_one_that_repeats_the_plan_is_not(made, campaign, compare_json):
    folder = campaign(sealed(made), eval_every=5)
    for reason, options in DEPARTURES.items():
        (told,) = compare_json(folder, *options)["exploratory"]
        assert told.startswith(reason)
    same = ["--metric", "eval_correct_rate", "--alpha", "0.05", "--baseline", "grpo+none", "--at", "20"]
    assert compare_json(folder, *same)["standing"] == NO_LEDGER


def test_fewer_and_more_seeds_are_told(made, campaign, compare_json):
    folder = campaign(sealed(made), seeds=[*range(6), 100], states={("maxrl+none", 3): "failed"})
    told = reasons(compare_json(folder))
    assert "grpo+none lacks 2 of the 8 planned seeds" in told
    assert "maxrl+none lacks 3 of the 8 planned seeds" in told
    assert "grpo+none has 1 seeds that were not planned" in told


def test_conditions_that_differ_and_a_changed_plan_are_named(made, campaign, compare_json):
    plan = sealed(made, conditions=["grpo+none", "maxrl+gtpo"]) | {"hypothesis": "maxrl learns less"}
    content = compare_json(campaign(plan))
    for reason in ("maxrl+none was not planned", "maxrl+gtpo was planned and is missing", "hash does not match"):
        assert reason in reasons(content)
    assert content["plan"]["intact"] is False


WRITTEN = {"2026-03-01T12:00:06+00:00": True, "2027-01-01T00:00:00+02:00": True}
WRITTEN |= {"2026-03-01T12:00:05.987654+00:00": False}


@pytest.mark.parametrize(("written", "is_late"), WRITTEN.items())
def test_a_plan_written_after_the_second_in_which_the_first_run_began_is_named(
    made, campaign, compare_json, written, is_late
):
    content = compare_json(campaign(sealed(made, written=written)))
    assert ("after the first run began" in reasons(content)) == is_late == (content["standing"] != NO_LEDGER)


@pytest.mark.parametrize("written", ["yesterday", "2026-03-01T12:00:00"])
def test_a_plan_without_a_time_proves_nothing(made, campaign, compare_json, written):
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
def test_a_plan_that_makes_no_sense_is_not_followed(made, campaign, compare_json, compare, plan):
    folder = campaign(None)
    edit(folder / "manifest.json", lambda manifest: manifest.update(plan=plan))
    content = compare_json(folder)
    assert (content["standing"], content["alpha"], content["direction"]) == ("exploratory", 0.05, "higher")
    assert "\x1b" not in compare(folder).out


def test_a_planned_metric_or_baseline_that_is_not_there_is_an_error(made, campaign, compare):
    result = compare(campaign(sealed(made, primary_metric="correct_rat:auc")))
    assert result.code == 2
    assert codes_in(result.err) == ["compare.unknown-metric"]
    assert "did you mean 'correct_rate'?" in result.err


@settings(max_examples=25)
@given(st.dictionaries(st.text(), st.one_of(st.text(), st.integers(), st.floats(0, 1), st.lists(st.text()))))
def test_both_rooms_hash_alike(content):
    digest = seal_of(content)
    assert digest == seal_of(dict(reversed(content.items())))
    assert digest == seal_of(json.loads(json.dumps(content | {"sha256": digest})))


def test_sealing():
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
def test_plans_that_are_refused(wrong):
    with pytest.raises(ValidationError):
        PlanTable(**{"hypothesis": "h", **wrong})


TWO_SEEDS = [1, 2]


@pytest.fixture
def folder(made, tmp_path):
    """A campaign of two conditions x two seeds."""
    return made.write_campaign(tmp_path / "c", EFFECTS, seeds=TWO_SEEDS, steps=20)


@pytest.fixture
def change(folder):
    """`change("grpo+none_s1", lambda record: ...)`: edit the `run.json` of a run."""
    return lambda name, how: edit(folder / "runs" / name / "run.json", how)


@pytest.fixture
def record(folder, change, tmp_path):
    """`record("grpo+none_s1", reward="return 1", own={...}, version="1.0")`: what the run consisted of."""

    def write(name, *, reward="return 1", version="1.0", own=False):
        source = tmp_path / "reward.py"
        source.write_text(f"def score():\n    {reward}\n")
        files = [hash_file("reward.py", source, Budget())]
        if own:
            (tmp_path / "extra.py").write_text("EXTRA = 1\n")
            files.append(hash_file("extra.py", tmp_path / "extra.py", Budget()))
        plugin = PluginFiles(version=version, is_ours=False, root="", files=())
        identity = Identity(code=tuple(files), plugins={"their-plugin": plugin})
        write_inputs(folder / "runs" / name, identity)
        change(name, lambda content: content.update(identity=identity.summary()))

    return write


def record_all(record):
    for label in EFFECTS:
        for seed in TWO_SEEDS:
            record(f"{label}_s{seed}")


def test_alike_runs_differ_in_nothing(folder, record, compare_json):
    assert compare_json(folder)["unknown_inputs"] == 4
    record_all(record)
    record("maxrl+none_s1", own=True)  # a part that only this condition names
    record("maxrl+none_s2", own=True)
    content = compare_json(folder)
    assert (content["undeclared"], content["unknown_inputs"]) == ([], 0)


def test_code_of_one_run_and_of_one_condition(folder, record, compare_json, compare):
    record_all(record)
    record("maxrl+none_s2", reward="return 0")
    told = "maxrl+none_s2: reward.py:2 changed: 'return 1' is now 'return 0' (against maxrl+none_s1)"
    content = compare_json(folder)
    assert content["undeclared"] == [told]
    assert content["standing"] == "exploratory"
    assert "the runs differ in more than their conditions say" in content["exploratory"]
    for arguments in ((), ("--markdown",)):
        shown = compare(folder, *arguments).out.replace("\\", "")
        assert f"differs in more than its condition says: {told}" in shown
    record("maxrl+none_s1", reward="return 0")
    record("grpo+none_s2", own=True)
    assert sorted(compare_json(folder)["undeclared"]) == [
        "grpo+none_s2: extra.py was not part of the run (against grpo+none_s1)",
        "maxrl+none: reward.py:2 changed: 'return 1' is now 'return 0' (against grpo+none)",
    ]


def test_plugins_libraries_and_devices(folder, record, change, compare_json):
    record_all(record)
    for seed in TWO_SEEDS:
        record(f"maxrl+none_s{seed}", version="2.0")
    change("grpo+none_s2", lambda content: content["libraries"].update(torch="2.8.0"))
    change("grpo+none_s1", lambda content: content.update(devices={"used": "cpu", "why": ""}))
    change("maxrl+none_s1", lambda content: content.update(devices={"used": "gpu:0", "why": ""}))
    assert compare_json(folder)["undeclared"] == [
        "grpo+none_s2: torch 2.8.0, not 2.13.0+cpu (against grpo+none_s1)",
        "maxrl+none: their-plugin was 1.0 and is now 2.0 (against grpo+none)",
        "maxrl+none: trained on a GPU, not on a CPU (against grpo+none)",
    ]


def test_keys_that_the_campaign_does_not_say(folder, change, compare_json):
    values = {"training.lr": 0.003, "training.batch_size": 8, "logging.log_dir": "x", "training.max_steps": 5}
    conditions = {"grpo+none": values, "maxrl+none": values | {"training.lr": 0.5}}
    (folder / "campaign.json").write_text(json.dumps({"conditions": conditions}))
    for seed in TWO_SEEDS:
        change(f"maxrl+none_s{seed}", lambda content: content["config"]["training"].update(lr=0.5))
    assert compare_json(folder)["undeclared"] == []  # the condition sets it
    change("maxrl+none_s2", lambda content: content["config"]["training"].update(lr=0.1))
    assert compare_json(folder)["undeclared"] == ["maxrl+none_s2: training.lr is 0.1, the campaign says 0.5"]


def test_keys_of_plain_runs(made, tmp_path, compare_json):
    runs = []
    for condition, lr in (("grpo+none", 0.003), ("maxrl+none", 0.5)):
        run = made.MadeRun(condition=condition, steps=20, config={"training": {"lr": lr}})
        runs.append(made.write_run(tmp_path / condition, run))
    assert compare_json(*runs)["undeclared"] == ["maxrl+none: training.lr is 0.5, in grpo+none it is 0.003"]
    more = made.MadeRun(condition="maxrl+none", steps=20, config={"training": {"lr": 0.003}})
    runs.append(made.write_run(tmp_path / "more", more))
    assert compare_json(*runs)["undeclared"] == []  # labels that differ in it show it


def test_an_insisted_resume_is_told(folder, change, compare_json):
    entry = {"step": 12, "time": "2026-03-01", "accepted": ["reward.py:3 changed"], "noticed": []}
    change("grpo+none_s2", lambda content: content.update(resumes=[entry]))
    assert compare_json(folder)["undeclared"] == ["grpo+none_s2: resumed at step 12 although reward.py:3 changed"]


@pytest.mark.parametrize("content", ["[]", '{"conditions": []}', '{"conditions": {"grpo+none": 3}}', "{"])
def test_hostile_records_are_no_traceback(folder, change, compare_json, content):
    (folder / "campaign.json").write_text(content)
    hostile = {"identity": [1], "devices": "cpu", "libraries": 3, "resumes": [3, {"accepted": 4}]}
    change("grpo+none_s2", lambda record: record.update(hostile))
    assert compare_json(folder)["unknown_inputs"] == 4
