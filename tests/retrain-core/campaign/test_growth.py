"""A campaign to which seeds and conditions are added runs only these; anything else that changed is told first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.kernel.errors import ResumeError
from tests.end_to_end.campaigns import manifest
from tests.kit.campaigns import conditions
from tests.kit.problems import codes_in

ONE = conditions("grpo+toy_flat")
TWO = ONE + conditions("toy_raw+toy_flat")
THREE = TWO + conditions("grpo+toy_index")
PLAN = '[campaign.plan]\nhypothesis = "better"\n'


@pytest.mark.parametrize("logs", [pytest.param(False, marks=pytest.mark.slow), True])
def test_only_added_seeds_and_conditions_run(
    play: Callable[..., list[str]], capsys: pytest.CaptureFixture[str], logs: bool
) -> None:
    first = play("seeds = [1, 2]", logs=logs)
    assert len(first) == 4
    assert play("seeds = [1, 2]", logs=logs) == []
    assert play("seeds = [3, 2, 1]", logs=logs) == ["grpo+toy_flat_s3", "toy_raw+toy_flat_s3"]
    assert "  added: seeds 3; existing runs are not repeated\n" in capsys.readouterr().out
    assert play("seeds = [3, 2, 1]", THREE, logs=logs) == [f"grpo+toy_index_s{seed}" for seed in (3, 2, 1)]
    [folder] = Path("logs").glob("campaign_*") if logs else [Path("out")]
    content = manifest(folder)
    assert (content["num_runs"], content["status"], len(content["runs"])) == (9, "done", 9)
    assert (content["seeds"], content["conditions"][2]) == ([3, 2, 1], "grpo+toy_index")
    assert [(each["seeds"], each["conditions"]) for each in content["grown"]] == [([3], []), ([], ["grpo+toy_index"])]
    assert {entry["attempts"] for entry in content["runs"]} == {1}
    assert not Path("out.1").exists()
    assert play("seeds = [3, 2, 1]", THREE, logs=logs) == []
    assert play("seeds = [1, 2, 3, 4]", THREE, arguments=("--resume", str(folder)), logs=logs) == [
        f"{label}_s4" for label in ("grpo+toy_flat", "toy_raw+toy_flat", "grpo+toy_index")
    ]


@pytest.mark.long
def test_what_else_changed_is_told_before_anything_runs_or_moves(play: Callable[..., list[str]]) -> None:
    play("seeds = [1, 2]")
    before = manifest()
    for campaign, given, told in (
        ("seeds = [1, 2, 3]", TWO + "lr = 0.5\n", "condition toy_raw+toy_flat was set and is now absent"),
        ("seeds = [1]", TWO, "seeds was [1, 2] and is now [1]"),
        ("seeds = [1, 2]", ONE, "condition toy_raw+toy_flat was set and is now absent"),
        ("seeds = [1, 2]\ndevices_per_run = 2", TWO, "devices_per_run was 1 and is now 2"),
        ("seeds = [1, 2]", TWO + PLAN, "plan was absent and is now set"),
    ):
        with pytest.raises(ResumeError) as caught:
            play(campaign, given)
        assert codes_in(caught) == ["campaign.different"]
        assert told in str(caught.value)
        assert "runs from their first step; 4 of the 4 earlier ones are done" in str(caught.value)
    assert manifest() == before
    assert not Path("out.1").exists()
    assert len(play("seeds = [1]", is_new=True)) == 2
    assert manifest("out.1") == before


def test_under_logs_another_campaign_of_the_file_says_so(
    play: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    play("seeds = [1]", ONE, logs=True)
    capsys.readouterr()
    assert play("seeds = [1]", ONE, logs=True, arguments=("--lr", "0.5")) == ["grpo+toy_flat_s1"]
    told = capsys.readouterr().out.splitlines()[0]
    assert told.startswith("note: another campaign than logs/campaign_")
    assert "training.lr was 4e-05 and is now 0.5; a new campaign runs all 1 runs" in told
    assert len(list(Path("logs").glob("campaign_*"))) == 2


def test_a_sealed_plan_does_not_grow_silently(play: Callable[..., list[str]]) -> None:
    play("seeds = [1, 2]", TWO + PLAN)
    sealed = manifest()["plan"]
    with pytest.raises(ResumeError, match="seeds 3 would be added") as caught:
        play("seeds = [1, 2, 3]", TWO + PLAN)
    assert codes_in(caught) == ["campaign.plan-sealed"]
    assert manifest()["seeds"] == [1, 2]
    assert len(play("seeds = [1, 2, 3]", TWO + PLAN, is_beyond_plan=True)) == 2
    content = manifest()
    assert content["plan"] == sealed
    assert (content["seeds"], content["grown"][0]["seeds"]) == ([1, 2, 3], [3])


@pytest.mark.long
def test_folders_of_an_earlier_version_continue_and_grow(play: Callable[..., list[str]]) -> None:
    """Its manifest has no `grown`, and its content lacks keys that have been added since."""
    play("seeds = [1]")
    content = json.loads(Path("out/campaign.json").read_text())
    for values in content["conditions"].values():
        del values["training.lr"], values["data.instruction"]
    Path("out/campaign.json").write_text(json.dumps(content))
    Path("out/manifest.json").write_text(json.dumps(manifest() | {"sha256": "of another version"}))
    assert play("seeds = [1]") == []
    assert play("seeds = [1, 2]") == ["grpo+toy_flat_s2", "toy_raw+toy_flat_s2"]
    Path("out/manifest.json").write_text(json.dumps(manifest() | {"sha256": "of another version"}))
    with pytest.raises(ResumeError, match=r"training\.lr was 4e-05 and is now 0\.5"):
        play("seeds = [1, 2]", arguments=("--lr", "0.5"))


@pytest.mark.long
def test_a_run_keeps_its_name_beside_one_that_differs_in_case(play: Callable[..., list[str]]) -> None:
    lower = ONE + "wandb_group = 'a'\n"
    assert play("seeds = [1]", lower) == ["grpo+toy_flat~wandb_group=a_s1"]
    [name] = play("seeds = [1]", lower + ONE + "wandb_group = 'A'\n")
    assert name.startswith("grpo+toy_flat~wandb_group=A-")


@pytest.mark.long
def test_a_damaged_content_starts_nothing(play: Callable[..., list[str]]) -> None:
    play("seeds = [1]", ONE)
    for content in ("", "[]", '{"seeds": [1]}', '{"seeds": 1, "conditions": {"a": 1}}'):
        Path("out/campaign.json").write_text(content)
        with pytest.raises(ResumeError, match=r"campaign\.json: cannot be read"):
            play("seeds = [1, 2]", ONE)
    assert not Path("out.1").exists()
