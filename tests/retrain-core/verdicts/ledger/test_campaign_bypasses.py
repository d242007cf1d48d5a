"""Ways around a plan that need no edit of the ledger: renamed, moved, re-paired and repeated campaigns are seen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from retrain.kernel.errors import StopRequested
from retrain.records.files import seal_of
from retrain.verdicts.ledger.chain import NAME

Campaign = Callable[..., Path]
Compare = Callable[..., dict[str, Any]]
FIRST, LATER = "2026-03-01T12:00:05+00:00", "2026-03-02T12:00:05+00:00"
RUN, OTHER = "runs/maxrl+none_s1", "runs/maxrl+none_s2"


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def better_rates(folder: Path) -> None:
    for seed in (1, 2):
        file = folder / f"runs/maxrl+none_s{seed}/metrics.jsonl"
        file.write_text(file.read_text().replace('"eval_correct_rate": 0.', '"eval_correct_rate": 0.9'))


def other_metric(folder: Path) -> None:
    def reseal(manifest: dict[str, Any]) -> None:
        plan = {**manifest["plan"], "primary_metric": "correct_rate:final"}
        manifest["plan"] = plan | {"sha256": seal_of(plan)}

    edit(folder / "manifest.json", reseal)


def other_seed_in_a_run(folder: Path) -> None:
    edit(folder / RUN / "run.json", lambda run: run.update(seed=3))
    edit(folder / "manifest.json", lambda content: content["runs"][2].update(seed=3))


def dropped_from_the_manifest(folder: Path) -> None:
    edit(folder / "manifest.json", lambda content: content["runs"].pop())


def runs_in_another_order(folder: Path) -> None:
    edit(folder / "manifest.json", lambda content: content["runs"].reverse())


def begun_at_another_time(folder: Path) -> None:
    edit(folder / RUN / "run.json", lambda run: run.update(started=LATER))


def one_run_twice(folder: Path) -> None:
    shutil.rmtree(folder / OTHER)
    shutil.copytree(folder / RUN, folder / OTHER)


def linked_to_another(folder: Path) -> None:
    shutil.rmtree(folder / OTHER)
    (folder / OTHER).symlink_to((folder / RUN).resolve())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (better_rates, "maxrl+none_s1: changed since the run ended: metrics.jsonl"),
        (other_metric, "the plan was resealed"),
        (other_seed_in_a_run, "run.json says maxrl+none, seed 3; it was run as maxrl+none, seed 1"),
        (dropped_from_the_manifest, "manifest.json does not list the runs of the campaign that was run"),
        (runs_in_another_order, "or in another order"),
        (begun_at_another_time, "maxrl+none_s1, begun 2026-03-01T12:00:05+00:00, done after 10 steps, is gone"),
        (one_run_twice, "maxrl+none_s2, begun 2026-03-01T12:00:05+00:00, done after 10 steps, is gone"),
        (linked_to_another, "maxrl+none_s2, begun 2026-03-01T12:00:05+00:00, done after 10 steps, is gone"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
@pytest.mark.parametrize("name", ["renamed", "campaign_a"])
def test_another_name_hides_no_change(
    change: Callable[[Path], None],
    words: str,
    name: str,
    campaign: Campaign,
    compare_json: Compare,
    command: Callable[..., Any],
) -> None:
    folder = campaign()
    change(folder)
    folder = folder.rename(folder.with_name(name))
    study = compare_json(folder)
    if change is other_seed_in_a_run and name == "renamed":  # by its hash: its name and its seed are no longer known
        words = "the same metrics.jsonl"
    assert any(words in line for line in study["notices"]), study["notices"]
    assert study["standing"] == "exploratory"
    assert command("compare", "--ledger").code == 1


def test_a_copy_with_better_rates_is_not_the_campaign(campaign: Campaign, compare_json: Compare) -> None:
    folder = campaign()
    copy = Path(shutil.copytree(folder, folder.with_name("copy")))
    assert compare_json(copy)["standing"] == "planned"
    better_rates(copy)
    assert compare_json(copy)["standing"] == "exploratory"
    assert compare_json(folder)["standing"] == "planned"


@pytest.mark.parametrize("deed", ["deleted", "replaced", "moved down", "linked"])
def test_without_its_ledger_a_plan_is_unverified(
    deed: str, campaign: Campaign, compare_json: Compare, compare: Callable[..., Any], tmp_path: Path
) -> None:
    folder = campaign()
    if deed == "deleted":
        (folder.parent / NAME).unlink()
    elif deed == "replaced":
        (folder.parent / NAME).unlink()
        shutil.move(folder, tmp_path / "kept")
        shutil.rmtree(campaign("other", seeds=(5, 6)))
        shutil.move(tmp_path / "kept", folder)
    elif deed == "moved down":
        below = folder.parent / "below" / folder.name
        below.parent.mkdir()
        folder = folder.rename(below)
    else:
        (tmp_path / "elsewhere").mkdir()
        shutil.move(folder, tmp_path / "elsewhere" / "c")
        folder.symlink_to(tmp_path / "elsewhere" / "c")
    for _ in range(2):  # the first look begins a ledger, which shows no more
        study = compare_json(folder)
        assert study["standing"] == "planned, unverified"
    assert "Planned, unverified: no ledger here has the plan and every run" in compare(folder).out


def test_a_campaign_moved_down_is_checked_against_the_ledger_above(campaign: Campaign, compare_json: Compare) -> None:
    folder = campaign()
    (folder.parent / "below").mkdir()
    folder = folder.rename(folder.parent / "below" / "c")
    better_rates(folder)
    study = compare_json(folder)
    assert study["standing"] == "exploratory"
    assert any("changed since the run ended: metrics.jsonl" in line for line in study["notices"])


@pytest.mark.parametrize("has_ledger", [True, False])
def test_seeds_that_were_paired_again_are_left_out(
    has_ledger: bool, campaign: Campaign, compare_json: Compare, command: Callable[..., Any]
) -> None:
    folder = campaign(seeds=(1, 2, 3))

    def pair_again(manifest: dict[str, Any]) -> None:
        first, second = manifest["runs"][3:5]
        first["run_name"], second["run_name"] = second["run_name"], first["run_name"]
        first["log_dir"], second["log_dir"] = second["log_dir"], first["log_dir"]

    edit(folder / "manifest.json", pair_again)
    if not has_ledger:
        (folder.parent / NAME).unlink()
    study = compare_json(folder)
    assert study["standing"] == "exploratory"
    reasons = [each["reason"] for each in study["left_out"]]
    assert reasons == ["manifest.json says seed 1, run.json seed 2", "manifest.json says seed 2, run.json seed 1"]
    assert not has_ledger or command("compare", "--ledger").code == 1


@pytest.mark.parametrize("fate", ["there", "renamed", "moved", "deleted"])
@pytest.mark.parametrize("planned", [(1, 2), (2, 1), (2, 9)])
def test_seeds_of_a_pilot_are_not_planned(
    fate: str, planned: tuple[int, ...], campaign: Campaign, compare_json: Compare, tmp_path: Path
) -> None:
    pilot = campaign("pilot", is_planned=False, seeds=(1, 2, 3), steps=6, run={"eval_every": 3})
    if fate == "deleted":
        shutil.rmtree(pilot)
    elif fate != "there":
        shutil.move(pilot, {"renamed": pilot.with_name("other"), "moved": tmp_path / "away"}[fate])
    study = compare_json(campaign(started=LATER, seeds=planned))
    assert any("these seeds were already run in pilot" in line for line in study["notices"]), study["notices"]
    assert study["standing"] == "exploratory"
    assert "already run in pilot" in study["comparisons"][0]["line"]


def test_single_runs_are_a_pilot_too(
    made: ModuleType, recorded: Callable[..., Path], campaign: Campaign, compare_json: Compare
) -> None:
    for seed in (1, 2):
        recorded(made.write_run(Path(f"logs/try{seed}"), made.MadeRun(seed=seed, steps=10, eval_every=5)))
    study = compare_json(campaign(started=LATER))
    assert any("already run in try1, try2" in line for line in study["notices"]), study["notices"]
    assert study["standing"] == "exploratory"


def test_a_pilot_of_which_the_ledger_was_deleted_is_still_there(
    campaign: Campaign, compare_json: Compare, command: Callable[..., Any]
) -> None:
    pilot = campaign("pilot", is_planned=False)
    (pilot.parent / NAME).unlink()
    study = compare_json(campaign(started=LATER, run={"spread": 0.05}))
    assert any("these seeds were already run in pilot/runs/" in line for line in study["notices"]), study["notices"]
    assert study["standing"] == "exploratory"
    assert command("compare", "--ledger").code == 1


def test_other_seeds_or_settings_are_no_pilot(campaign: Campaign, compare_json: Compare, tmp_path: Path) -> None:
    campaign("pilot", is_planned=False, seeds=(7, 8))
    campaign("other", is_planned=False, run={"config": {"training": {"lr": 0.1}}, "spread": 0.03})
    study = compare_json(campaign(started=LATER))
    assert (study["standing"], study["notices"]) == ("planned", [])


@pytest.mark.parametrize("planned", [{"hypothesis": "maxrl+none ends higher"}, {"primary_metric": "loss:final"}])
def test_another_hypothesis_or_metric_is_the_same_campaign(
    planned: dict[str, str], campaign: Campaign, compare_json: Compare, command: Callable[..., Any]
) -> None:
    first = campaign()
    second = campaign("campaign_b", started=LATER, run={"spread": 0.05}, **planned)
    for folder, words in ((first, "run again in campaign_b"), (second, "already run in campaign_a")):
        study = compare_json(folder)
        assert any(f"these seeds were {words}" in line for line in study["notices"]), study["notices"]
        assert study["standing"] == "exploratory"
    assert command("compare", "--ledger").code == 1


def test_a_killed_run_that_was_repeated_is_named(
    made: ModuleType, recorded: Callable[..., Path], campaign: Campaign, compare_json: Compare
) -> None:
    folder = campaign()
    run = folder / "runs/maxrl+none_s3"
    recorded(made.write_run(run, made.MadeRun(seed=3, steps=6)), StopRequested("SIGTERM"), started=FIRST)
    run.rename(f"{run}.1")
    recorded(made.write_run(run, made.MadeRun(seed=3, steps=10)), started=LATER)
    study = compare_json(folder)
    words = "maxrl+none_s3, begun 2026-03-01T12:00:05+00:00, stopped after 6 steps; it was run again"
    assert any(words in line for line in study["notices"]), study["notices"]
    assert study["standing"] == "exploratory"


def test_runs_that_were_not_given_are_named(campaign: Campaign, compare_json: Compare) -> None:
    folder = campaign(seeds=(1, 2, 3))
    given = [folder / "runs" / f"{label}_s{seed}" for label in ("grpo+none", "maxrl+none") for seed in (1, 3)]
    (named,) = compare_json(*given)["notices"]
    assert named == (
        "2 finished runs of these conditions on record were not given: "
        "campaign_a/runs/grpo+none_s2, campaign_a/runs/maxrl+none_s2"
    )


def test_the_order_of_folders_changes_nothing(campaign: Campaign, compare_json: Compare) -> None:
    folder = campaign(seeds=(1, 2, 3, 4))
    runs = sorted((folder / "runs").iterdir())
    for number, run in enumerate(runs):
        edit(
            run / "run.json", lambda content, number=number: content.update(started=f"2026-03-01T12:00:{59 - number}Z")
        )
    given = [compare_json(*order, "--baseline", "grpo+none") for order in (runs, runs[::-1], [*runs[2:], *runs[:2]])]
    seeds = [study["comparisons"][0]["seeds"] for study in given]
    assert seeds == [[4, 3, 2, 1]] * 3


@pytest.mark.parametrize(
    ("table", "key", "value"), [("eval", "seed", 0), ("eval", "examples", 64), ("data", "source", "arithmetic")]
)
def test_conditions_with_other_held_out_examples_are_not_compared_on_them(
    table: str, key: str, value: object, campaign: Campaign, compare_json: Compare
) -> None:
    folder = campaign()
    for seed in (1, 2):
        edit(folder / f"runs/maxrl+none_s{seed}/run.json", lambda run: run["config"][table].update({key: 7}))
    study = compare_json(folder)
    reason = f"other held-out examples: maxrl+none: {table}.{key} is 7, in grpo+none_s1 {value!r}"
    assert reason in study["exploratory"]
    assert study["standing"] == "exploratory"
    assert "on these 64 examples" not in study["comparisons"][0]["line"]
    assert "different held-out examples" in study["comparisons"][0]["line"]


def test_other_ids_are_other_examples_whatever_the_settings(campaign: Campaign, compare_json: Compare) -> None:
    folder = campaign(run={"example_spread": 1.0})
    assert "on these 64 examples" in compare_json(folder)["comparisons"][0]["line"]
    for seed in (1, 2):
        file = folder / f"runs/maxrl+none_s{seed}/eval.jsonl"
        file.write_text(file.read_text().replace('"made-', '"other-'))
    study = compare_json(folder)
    assert any("other held-out examples: " in reason for reason in study["exploratory"])
    assert "on these 64 examples" not in study["comparisons"][0]["line"]
