"""Every way around a plan is named in the verdict, makes it exploratory, and fails `retrain compare --ledger`."""

import json
import shutil
from pathlib import Path

import pytest

from retrain.kernel.errors import ConfigError, StopRequested
from retrain.records.files import seal_of
from retrain.verdicts.ledger.chain import NAME
from retrain.verdicts.study.comparison_with_ledger import comparison_with_ledger
from retrain.verdicts.study.study import Options
from retrain.verdicts.wording.command import command as compare_command
from tests.kit.edited import edit
from tests.kit.invoke import invoke
from tests.kit.ledgers import recorded
from tests.kit.made_runs import MadeRun, write_run
from tests.kit.problems import codes_in

RUN, OTHER = Path("runs/maxrl+none_s1"), Path("runs/maxrl+none_s2")
LATER = "2036-03-01T12:00:05+00:00"
BEGUN = "begun 2026-03-01T12:00:05+00:00"


def run_edit(field, **values):
    """A change of `run.json`, in the table of the configuration `field` or at its top."""
    return lambda folder: edit(
        folder / RUN / "run.json", lambda run: (run["config"][field] if field else run).update(values)
    )


def manifest_edit(change):
    return lambda folder: edit(folder / "manifest.json", change)


def resealed(manifest):
    plan = {**manifest["plan"], "primary_metric": "correct_rate:final"}
    manifest["plan"] = plan | {"sha256": seal_of(plan)}


def replaced(old, new, *, file="metrics.jsonl", runs=(RUN,)):
    def change(folder):
        for path in [folder / run / file for run in runs]:
            assert old in path.read_text()
            path.write_text(path.read_text().replace(old, new, 1))

    return change


BETTER = replaced('"eval_correct_rate": 0.', '"eval_correct_rate": 0.9', runs=(RUN, OTHER))


def rolled(*, keeps, is_on_record=True):
    """The run is done again with a better end; the first one is deleted, or kept beside it."""

    def change(folder):
        (folder / RUN).rename(folder / f"{RUN}.kept") if keeps else shutil.rmtree(folder / RUN)
        run = write_run(folder / RUN, MadeRun(seed=1, steps=10, effect=0.3, eval_every=5))
        recorded(run, started=LATER) if is_on_record else run_edit("", started=LATER)(folder)

    return change


def another_run(how):
    def change(folder):
        shutil.rmtree(folder / OTHER)
        how((folder / RUN).resolve(), folder / OTHER)

    return change


def other_seed(folder):
    run_edit("", seed=3)(folder)
    edit(folder / "manifest.json", lambda content: content["runs"][2].update(seed=3))


def ledger_edit(change):
    def changed(folder):
        file = folder.parent / NAME
        file.write_text("".join(change(file.read_text().splitlines(keepends=True))))

    return changed


GONE = f"{BEGUN}, done after 10 steps, is gone"
CHANGED = "maxrl+none_s1: changed since the run ended: "
# A change, its words in the verdict and the check, and whether it is tried in a renamed folder, too.
CHANGES = {
    "another metric is sealed": (manifest_edit(resealed), "the plan was resealed", True),
    "better rates": (BETTER, f"{CHANGED}metrics.jsonl", True),
    "another seed": (other_seed, "run.json says maxrl+none, seed 3; it was run as maxrl+none, seed 1", True),
    "a run less": (manifest_edit(lambda c: c["runs"].pop()), "manifest.json does not list the runs", True),
    "another order": (manifest_edit(lambda c: c["runs"].reverse()), "or in another order", True),
    "another start": (run_edit("", started=LATER), f"maxrl+none_s1, {GONE}", True),
    "one run twice": (another_run(shutil.copytree), f"maxrl+none_s2, {GONE}", True),
    "a link": (another_run(lambda old, new: new.symlink_to(old)), f"maxrl+none_s2, {GONE}", True),
    "metrics of another": (
        lambda folder: shutil.copy(folder / OTHER / "metrics.jsonl", folder / RUN / "metrics.jsonl"),
        "maxrl+none_s1: the same metrics.jsonl",
        False,
    ),
    "a space": (replaced('"step": 3', '"step": 3 '), f"{CHANGED}metrics.jsonl", False),
    "evaluations": (lambda folder: (folder / RUN / "eval.jsonl").write_text("{}\n"), f"{CHANGED}eval.jsonl", False),
    "another rate": (run_edit("training", lr=0.01), f"{CHANGED}the settings in run.json", False),
    "another model": (run_edit("model", model="other"), f"{CHANGED}the settings in run.json", False),
    "other code": (run_edit("", identity={"code": {"digest": "d"}}), f"{CHANGED}code and data in run.json", False),
    "set aside": (run_edit("", status="failed"), "maxrl+none_s1: run.json says failed, the run ended done", False),
    "deleted": (lambda folder: shutil.rmtree(folder / RUN), f"maxrl+none_s1, {GONE}", False),
    "rolled again": (rolled(keeps=False), f"{GONE}; it was run again at 2036", False),
    "run again": (rolled(keeps=True), f"maxrl+none_s1, {BEGUN}, was done; it was run again at 2036", False),
    "brought in": (rolled(keeps=True, is_on_record=False), "maxrl+none_s1: the ledger never saw it begin", False),
    "redefined": (manifest_edit(lambda c: c.update(sha256="another")), "does not define the campaign", False),
    "ledger edited": (
        ledger_edit(lambda lines: [line.replace('"state": "done"', '"state": "gone"') for line in lines]),
        "was edited",
        False,
    ),
    "ledger cut": (ledger_edit(lambda lines: lines[:3] + lines[4:]), "ledger.jsonl: line 4 does not follow", False),
}
NAMED = [(key, "campaign_a") for key in CHANGES] + [
    (key, "renamed") for key, (*_, is_named) in CHANGES.items() if is_named
]


def studied(folder):
    return comparison_with_ledger([folder], Options())


def is_named(words, study):
    """True if the notices have these words, and the comparison is not taken for a planned one."""
    return any(words in line for line in study.notices) and study.standing == "exploratory"


def verified(*arguments):
    result = invoke(compare_command, ["--ledger", *arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize(("key", "name"), NAMED)
def test_a_way_around_the_plan_is_named_whatever_the_folder_is_called(key, name, campaign):
    change, words, _ = CHANGES[key]
    folder = campaign()
    change(folder)
    folder = folder.rename(folder.with_name(name))
    if (key, name) == ("another seed", "renamed"):  # by its hash: its name and its seed are no longer known
        words = "the same metrics.jsonl"
    study = studied(folder)
    assert is_named(words, study), study.notices
    code, said = verified()
    assert code == 1
    assert name == "renamed" or words in said, said


def test_an_honest_campaign_is_as_planned_where_it_is_moved_or_copied_as_a_whole(campaign, tmp_path):
    folder = campaign()
    study = studied(folder)
    assert (study.standing, study.exploratory, study.notices) == ("planned", (), ())
    code, said = verified("logs", "--json")
    content = json.loads(said)
    assert (code, content["intact"], content["findings"]) == (0, True, [])
    assert verified(str(folder / RUN), "--head", content["head"])[0] == 0
    code, said = verified("--head", "f" * 64)
    assert (code, "cut or rewritten" in said) == (1, True)
    moved = Path(shutil.copytree(folder, tmp_path / "elsewhere/campaign_a"))
    study = studied(moved)
    assert study.standing == "planned, unverified"
    assert [line.startswith("unknown: ") for line in study.notices] == [True]
    shutil.copytree("logs", tmp_path / "whole")
    assert verified(str(tmp_path / "whole"))[0] == 0
    copy = Path(shutil.copytree(folder, folder.with_name("copy")))
    assert studied(copy).standing == "planned"
    BETTER(copy)
    assert (studied(copy).standing, studied(folder).standing) == ("exploratory", "planned")
    shutil.rmtree(copy)
    folder.rename(folder.with_name("renamed"))
    assert verified("logs")[0] == 0


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_second_campaign_of_a_plan_is_named_in_both(is_deleted, campaign):
    folders = [campaign(), campaign("campaign_b", is_new=True)]
    if is_deleted:
        shutil.rmtree(folders.pop(0))
    for study in map(studied, folders):
        named = next(line for line in study.notices if "second campaign of the same plan, by --new" in line)
        assert named.endswith("and it is gone") is is_deleted
        assert study.standing == "exploratory"
    code, said = verified()
    assert (code, "second campaign of the same plan" in said) == (1, True)


def test_another_campaign_in_the_same_folder_has_not_run_the_earlier_one_again(campaign):
    folder = campaign()
    folder.rename(folder.with_name("campaign_a.1"))  # as `--new` does with a folder that was given
    study = studied(campaign(is_new=True, started="2026-03-02T12:00:05+00:00", hypothesis="another"))
    assert not [line for line in study.notices if "run again at" in line], study.notices


def test_looks_and_metrics_are_counted_once_each_and_follow_a_renamed_folder(campaign, compare, compare_json):
    folder = campaign()
    for options in ((), (), ("--metric", "loss", "--lower"), ("--at", 8), ("--last", 2), ()):
        compare_json(folder, *options)
    wanted = {"looks": 4, "metrics": ["eval_correct_rate:final", "loss:final"], "choices": 4}
    assert compare_json(folder)["shopping"] == wanted | {"registered_in": "campaign.toml"}
    assert "4 looks, at 2 metrics, with 4 choices" in compare(folder).out
    events = [line.split()[1] for line in verified("--events")[1].splitlines()]
    assert events[-8:] == ["look", "verdict"] * 4
    assert compare_json(folder.rename("logs/renamed"))["shopping"]["looks"] == 4


@pytest.mark.parametrize("deed", ["deleted", "replaced", "moved down", "linked", "no file"])
def test_without_its_ledger_a_plan_is_unverified(deed, campaign, compare, tmp_path):
    folder = campaign()
    ledger = folder.parent / NAME
    if deed in ("deleted", "replaced", "no file"):
        ledger.unlink()
    if deed == "deleted":
        refused = invoke(compare_command, ["--ledger"]).exception
        assert isinstance(refused, ConfigError)
        assert codes_in(refused) == ["ledger.missing"]
    elif deed == "replaced":
        shutil.move(folder, tmp_path / "kept")
        shutil.rmtree(campaign("other", seeds=(5, 6)))
        shutil.move(tmp_path / "kept", folder)
    elif deed == "moved down":
        folder = Path(shutil.move(folder, folder.parent / "below" / folder.name))
    elif deed == "linked":
        shutil.move(folder, tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        ledger.mkdir()
    for _ in range(2):  # the first look begins a ledger, which shows no more
        study = studied(folder)
        assert study.standing == "planned, unverified"
        assert study.comparisons[0].verdict == "cannot tell"
    assert "Planned, unverified: no ledger here has the plan and every run" in compare(folder).out
    if deed == "deleted":
        assert "the ledger knows nothing before" in study.notices[0]
        code, said = verified()
        assert (code, "the ledger knows nothing before" in said) == (0, True)


@pytest.mark.parametrize(("below", "is_seen"), [("x", True), ("x/y/z", True), ("w/x/y/z", False)])
def test_a_campaign_moved_down_is_checked_against_the_ledger_up_to_three_levels_above(below, is_seen, campaign):
    folder = campaign()
    folder = Path(shutil.move(folder, folder.parent / below / "c"))
    BETTER(folder)
    assert is_named("changed since the run ended: metrics.jsonl", studied(folder)) is is_seen


@pytest.mark.parametrize("has_ledger", [True, False])
def test_seeds_that_were_paired_again_are_left_out(has_ledger, campaign):
    folder = campaign(seeds=(1, 2, 3))

    def pair_again(manifest):
        first, second = manifest["runs"][3:5]
        for name in ("run_name", "log_dir"):
            first[name], second[name] = second[name], first[name]

    manifest_edit(pair_again)(folder)
    if not has_ledger:
        (folder.parent / NAME).unlink()
    study = studied(folder)
    assert study.standing == "exploratory"
    reasons = ["manifest.json says seed 1, run.json seed 2", "manifest.json says seed 2, run.json seed 1"]
    assert [each.reason for each in study.left_out] == reasons
    assert not has_ledger or verified()[0] == 1


@pytest.mark.parametrize("fate", ["there", "renamed", "moved", "deleted"])
@pytest.mark.parametrize("planned", [(1, 2), (2, 9)])
def test_seeds_of_a_pilot_are_not_planned(fate, planned, campaign, compare_json, tmp_path):
    pilot = campaign("pilot", is_planned=False, seeds=(1, 2, 3), steps=6, run={"eval_every": 3})
    if fate == "deleted":
        shutil.rmtree(pilot)
    elif fate != "there":
        shutil.move(pilot, {"renamed": pilot.with_name("other"), "moved": tmp_path / "away"}[fate])
    folder = campaign(started=LATER, seeds=planned)
    assert is_named("these seeds were already run in pilot", studied(folder))
    assert "already run in pilot" in compare_json(folder)["comparisons"][0]["line"]


def test_single_runs_are_a_pilot_and_so_is_one_of_which_the_ledger_was_deleted(campaign):
    campaign("begun", is_planned=False, seeds=(8, 9))  # its fixture enters the folder
    for seed in (1, 2):
        recorded(write_run(Path(f"logs/try{seed}"), MadeRun(seed=seed, steps=10, eval_every=5)))
    assert is_named("already run in try1, try2", studied(campaign(started=LATER)))
    for folder in Path("logs").iterdir():
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    (campaign("pilot", is_planned=False).parent / NAME).unlink()
    assert is_named("already run in pilot/runs/", studied(campaign(started=LATER, run={"spread": 0.05})))
    assert verified()[0] == 1


def test_other_seeds_or_settings_are_no_pilot(campaign):
    campaign("pilot", is_planned=False, seeds=(7, 8))
    campaign("other", is_planned=False, run={"config": {"training": {"lr": 0.1}}, "spread": 0.03})
    study = studied(campaign(started=LATER))
    assert (study.standing, study.notices) == ("planned", ())


@pytest.mark.parametrize("planned", [{"hypothesis": "maxrl+none ends higher"}, {"primary_metric": "loss:final"}])
def test_another_hypothesis_or_metric_is_the_same_campaign(planned, campaign):
    first, second = campaign(), campaign("campaign_b", started=LATER, run={"spread": 0.05}, **planned)
    for folder, words in ((first, "run again in campaign_b"), (second, "already run in campaign_a")):
        assert is_named(f"these seeds were {words}", studied(folder))
    assert verified()[0] == 1


def test_runs_that_were_repeated_or_not_given_are_named(campaign):
    folder = campaign(seeds=(1, 2, 3))
    given = [folder / "runs" / f"{label}_s{seed}" for label in ("grpo+none", "maxrl+none") for seed in (1, 3)]
    (named,) = comparison_with_ledger(given, Options()).notices
    assert named.startswith(
        "2 finished runs of these conditions on record were not given: campaign_a/runs/grpo+none_s2"
    )
    run = folder / "runs/maxrl+none_s4"
    recorded(write_run(run, MadeRun(seed=4, steps=6)), StopRequested("SIGTERM"), started="2026-03-01T12:00:05+00:00")
    run.rename(f"{run}.1")
    recorded(write_run(run, MadeRun(seed=4, steps=10)), started=LATER)
    assert is_named(f"maxrl+none_s4, {BEGUN}, stopped after 6 steps; it was run again", studied(folder))
    again = folder / RUN
    rolled(keeps=False)(folder)
    named = comparison_with_ledger([again, folder / OTHER], Options()).notices
    assert [line for line in named if f"maxrl+none_s1, {BEGUN}" in line and "run again at 2036" in line], named


def test_the_order_of_folders_changes_nothing(campaign):
    runs = sorted((campaign(seeds=(1, 2, 3, 4)) / "runs").iterdir())
    for number, run in enumerate(runs):
        time = f"2026-03-01T12:00:{59 - number}Z"
        edit(run / "run.json", lambda content, time=time: content.update(started=time))
    options = Options(baseline="grpo+none")
    given = [comparison_with_ledger(order, options) for order in (runs, runs[::-1], [*runs[2:], *runs[:2]])]
    assert [study.comparisons[0].seeds for study in given] == [(4, 3, 2, 1)] * 3


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [("eval", "seed", 0), ("eval", "examples", 64), ("data", "source", "arithmetic"), ("", "", 0)],
)
def test_conditions_with_other_held_out_examples_are_not_compared_on_them(table, key, value, campaign, compare_json):
    """By the settings, and by the ids in `eval.jsonl` whatever the settings."""
    folder = campaign(run={} if table else {"example_spread": 1.0})
    assert "on these 64 examples" in compare_json(folder)["comparisons"][0]["line"]
    for run in [folder / f"runs/maxrl+none_s{seed}" for seed in (1, 2)]:
        if table:
            edit(run / "run.json", lambda content: content["config"][table].update({key: 7}))
        else:
            (run / "eval.jsonl").write_text((run / "eval.jsonl").read_text().replace('"made-', '"other-'))
    study = compare_json(folder)
    reason = f"maxrl+none: {table}.{key} is 7, in grpo+none_s1 {value!r}" if table else ""
    assert any(each.startswith(f"other held-out examples: {reason}") for each in study["exploratory"])
    assert study["standing"] == "exploratory"
    assert "on these 64 examples" not in study["comparisons"][0]["line"]
    assert not table or "different held-out examples" in study["comparisons"][0]["line"]
