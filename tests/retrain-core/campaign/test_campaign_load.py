"""A campaign from file, environment and command line; all its problems at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.campaign.load import Campaign, controls_of, load_campaign, warnings_of
from retrain.campaign.planned import config_text, plan_runs, run_config
from retrain.kernel.errors import ConfigError
from retrain.kernel.registry import Plugins
from retrain.run.configure import load_checked
from tests.kit.shared import first_or_long

TWO = """
[[campaign.conditions]]
advantage_mode = "toy_raw"
transform_mode = "toy_flat"

[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "toy_index"
"""
Load = Callable[..., Campaign]
SEEDS = "seeds = [1, 2]\n"
FEW = "no verdict is possible. 2 seeds: smallest possible p 0.5; plan at least 6"


@pytest.mark.parametrize(
    ("own", "base", "arguments", "wanted"),
    [
        ("", "", (), 500),
        ("max_steps = 7", "", (), 7),
        ("", "max_steps = 9", (), 9),
        ("max_steps = 7", "max_steps = 9", (), 7),
        ("max_steps = 7", "max_steps = 9", ("--max-steps", "3"), 3),
        ("max_steps = 7", "", ("--campaign-max-steps", "4"), 4),
    ],
)
def test_where_the_number_of_steps_comes_from(
    write: Callable[..., Path], toy_plugins: Plugins, own: str, base: str, arguments: Any, wanted: int
) -> None:
    file = write(SEEDS + own)
    file.write_text(file.read_text().replace("[training]\n", f"[training]\n{base}\n"))
    campaign = load_campaign([str(file), *arguments], toy_plugins)
    assert campaign.max_steps == wanted
    assert {campaign.steps_of(condition) for condition in campaign.conditions} == {wanted}


def test_a_condition_may_have_steps_of_its_own(load_text: Load) -> None:
    campaign = load_text(SEEDS + "max_steps = 4", f"{TWO}max_steps = 9")
    assert [campaign.steps_of(condition) for condition in campaign.conditions] == [4, 9]


def test_overrides_reach_every_condition_that_does_not_set_the_key(load_text: Load) -> None:
    campaign = load_text(SEEDS, f"{TWO}lr = 0.5", arguments=("--lr", "0.25", "--data-opt", "count=7"))
    assert [condition.config.training.lr for condition in campaign.conditions] == [0.25, 0.5]
    assert [condition.config.data.options for condition in campaign.conditions] == [{"count": 7}] * 2


def test_without_conditions_there_are_the_five(load_text: Load) -> None:
    labels = load_text(SEEDS, "").labels
    assert labels == ["grpo+none", "maxrl+none", "maxrl+gtpo", "maxrl+gtpo_hicra", "maxrl+gtpo_sepa"]


def test_every_problem_at_once_with_its_place(load_text: Load) -> None:
    conditions = TWO + 'transform_params = 3\nlrr = 1.0\nbatch_size = 0\nreward_type = "mtch"\n'
    with pytest.raises(ConfigError) as caught:
        load_text('seeds = [1, 1]\nlauncher = "subproces"\nretrys = 1', conditions, "[traning]\nlr = 1.0\n")
    told = str(caught.value)
    for wanted in (
        *("1 is listed more than once", "'subproces'", "retrys: unknown key", "[traning]: unknown table"),
        *("c.toml:14 condition 2 lrr: unknown key", "c.toml:15 condition 2 [training] batch_size", "'mtch'"),
        "c.toml:13 condition 2 [algorithm] transform_params",
    ):
        assert wanted in told, told
    assert told.count("unknown table") == 1  # not once per condition


@pytest.mark.parametrize(
    ("campaign", "conditions", "what"),
    first_or_long(
        [
            ("seeds = []", "", "at least one seed"),
            ("seeds = [-1]", "", "-1 is not a seed"),
            ("conditions = []", "", "at least one condition"),
            ("", '[[campaign.conditions]]\nadvantage_mode = "grpo"\n', "condition 1 needs transform_mode"),
            ("", '[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "no"\n', "'no'"),
            ("[campaign.launcher_options]\nx = 1\n", "", "unknown option 'x'"),
            ('[campaign.plan]\nhypothesis = "h"\nbaseline = "nobody"\n', "", "'nobody' is not a condition"),
            ("[campaign.plan]\nalpha = 0.5\n", "", "Field required"),
        ]
    ),
)
def test_what_is_refused_in_the_file(load_text: Load, campaign: str, conditions: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(campaign, conditions)
    assert what in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--seed", "3"), "seeds belong to the campaign"),
        (("--advantage-mode", "grpo"), "every condition sets its own advantage_mode"),
        (("--transform-mode", "none"), "every condition sets its own transform_mode"),
        (("--algorithm-mode", "maxrl_gtpo"), "replaces the modes"),
        (("--devices", "gpu:0,cpu"), "only if all of them are GPUs"),
        (("--devices", "gpu:0,gpu:1", "--campaign-devices-per-run", "3"), "fewer than devices_per_run"),
        (("--sed", "3"), "unknown flag --sed"),
    ],
)
def test_what_is_refused_on_the_command_line(load_text: Load, arguments: tuple[str, ...], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(SEEDS, arguments=arguments)
    assert what in str(caught.value)


RECIPES = """
conditions = [
  { recipe = "dapo" },
  { recipe = "cispo", lr = 0.5, surprisal_mask_rho = 0.2 },
  { recipe = "dapo", "algorithm.clip_eps" = 0.1 },
  { advantage_mode = "grpo", transform_mode = "toy_flat" },
]
"""


def test_a_condition_may_name_a_recipe_alone(load_text: Load) -> None:
    campaign = load_text(SEEDS, RECIPES)
    wanted = ["dapo", "cispo~lr=0.5,surprisal_mask_rho=0.2", "dapo~clip_eps=0.1", "grpo+toy_flat"]
    assert campaign.labels == wanted
    dapo, _, narrow, plain = (each.config for each in campaign.conditions)
    assert (dapo.algorithm.loss, dapo.algorithm.clip_eps, dapo.algorithm.clip_eps_high) == ("ppo", 0.2, 0.28)
    assert (narrow.algorithm.clip_eps, narrow.algorithm.clip_eps_high) == (0.1, 0.28)
    assert dapo.training.overlong == "mask"
    assert (plain.algorithm.recipe, plain.algorithm.loss) == ("", "importance_sampling")
    assert len({json.dumps(values, default=str) for values in campaign.content()["conditions"].values()}) == 4


@pytest.mark.long
def test_the_run_of_a_recipe_has_its_values_and_label(load_text: Load, toy_plugins: Plugins, tmp_path: Path) -> None:
    campaign = load_text(SEEDS, RECIPES)
    for run in plan_runs(campaign, tmp_path):
        file = tmp_path / "run.toml"
        file.write_text(config_text(run_config(run, campaign, None)))
        checked = load_checked([str(file)], toy_plugins)
        algorithm = run.condition.config.algorithm
        assert checked.config.algorithm.model_dump() == algorithm.model_dump()
        assert checked.flow.condition.startswith(algorithm.recipe or "grpo+toy_flat")


@pytest.mark.parametrize(
    ("conditions", "arguments", "more", "what"),
    first_or_long(
        [
            ('conditions = [{ recipe = "dapp" }]', (), "", "no recipe named 'dapp'"),
            ('conditions = [{ recipe = "" }]', (), "", "condition 1 needs recipe"),
            ('conditions = [{ recipe = "dapo" }, { recipe = "dapo" }]', (), "", "is the same as condition 1: dapo"),
            (RECIPES, ("--recipe", "dapo"), "", "every condition sets its own recipe"),
            (RECIPES, ("--advantage-mode", "maxrl"), "", "every condition sets its own advantage_mode"),
            (RECIPES, (), 'advantage_mode = "maxrl"', "beats recipe 'dapo' of a condition"),
        ]
    ),
)
def test_what_is_refused_beside_recipes(
    write: Callable[..., Path], toy_plugins: Plugins, conditions: str, arguments: Any, more: str, what: str
) -> None:
    file = write(SEEDS, conditions)
    file.write_text(file.read_text().replace("[algorithm]\n", f"[algorithm]\n{more}\n"))
    with pytest.raises(ConfigError) as caught:
        load_campaign([str(file), *arguments], toy_plugins)
    assert what in str(caught.value)


def test_a_base_value_that_beats_recipes_is_told(write: Callable[..., Path], toy_plugins: Plugins) -> None:
    campaign = load_campaign([str(write(SEEDS, RECIPES)), "--loss", "cispo"], toy_plugins)
    assert "dapo: the campaign sets loss, uncertainty_kind, against its recipe" in warnings_of(campaign)


def test_explain_shows_what_each_recipe_sets(write: Callable[..., Path], command: Callable[..., Any]) -> None:
    result = command("explain", str(write(SEEDS, RECIPES)), "--json")
    recipes = json.loads(result.out)["recipes"]
    assert list(recipes) == ["dapo", "cispo~lr=0.5,surprisal_mask_rho=0.2", "dapo~clip_eps=0.1"]
    assert recipes["dapo"]["algorithm.clip_eps_high"] == {"value": 0.28, "origin": "recipe dapo"}
    assert "algorithm.clip_eps" not in recipes["dapo~clip_eps=0.1"]
    text = command("explain", "c.toml").out
    assert "Values that dapo takes from its recipe:" in text
    assert 'algorithm.loss       = "ppo"  (recipe dapo)' in text


def test_explain_tells_the_shape(write: Callable[..., Path], command: Callable[..., Any]) -> None:
    file = write(SEEDS + "max_steps = 4", f"{TWO}max_steps = 9\n")
    result = command("explain", str(file), "--json", "--lr", "0.5")
    assert (result.code, result.err) == (0, "")
    content = json.loads(result.out)
    assert content["mode"] == "campaign"
    assert content["conditions"] == ["toy_raw+toy_flat", "grpo+toy_index~max_steps=9"]
    assert {name: content[name] for name in ("seeds", "max_steps", "total_runs", "total_steps", "backend")} == {
        "seeds": [1, 2],
        "max_steps": 4,
        "total_runs": 4,
        "total_steps": 26,
        "backend": "toy",
    }
    assert content["warnings"] == [FEW]
    assert content["origins"]["training.lr"] == {"value": 0.5, "origin": "--lr"}
    assert "conditions           : toy_raw+toy_flat, grpo+toy_index~max_steps=9" in command("explain", str(file)).out


@pytest.mark.long
def test_what_may_surprise_is_told(load_text: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    parallel = ("--campaign-parallel", "true")
    assert warnings_of(load_text(SEEDS)) == [FEW]
    assert warnings_of(load_text("seeds = [1, 2, 3, 4, 5, 6]\n")) == []
    planned = 'seeds = [1, 2, 3, 4]\n\n[campaign.plan]\nhypothesis = "h"\ntest = "unpaired"\n'
    assert warnings_of(load_text(planned)) == []
    controls = 'seeds = [1, 2, 3, 4, 5, 6]\ncontrols = ["random_reward", "no_update"]\n'
    assert warnings_of(load_text(controls)) == []  # controls add no comparison
    assert warnings_of(load_text(SEEDS, arguments=(*parallel, "--devices", "gpu:0,gpu:1"))) == [
        "4 runs at a time on 2 cores; [campaign] max_workers limits them",
        "4 runs at a time share 2 devices",
        FEW,
    ]
    assert warnings_of(load_text(SEEDS, arguments=(*parallel, "--campaign-max-workers", "2"))) == [FEW]


def test_the_command_wants_a_campaign(write: Callable[..., Path], command: Callable[..., Any], tmp_path: Path) -> None:
    write()
    (tmp_path / "plain.toml").write_text("[training]\nlr = 1.0\n")
    result = command("campaign", "plain.toml")
    assert result.code == 2
    assert "has no [campaign] table" in result.err


def test_a_campaign_without_its_room_is_refused(
    write: Callable[..., Path], command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    file = write()
    monkeypatch.setitem(sys.modules, "retrain.campaign", None)
    result = command(str(file))
    assert result.code == 2
    assert "[campaign]: unknown table" in result.err
    assert "reinstall retrain-core" in result.err
    assert not Path("out").exists()


def test_controls_are_conditions_beside_those_that_are_compared_with_the_baseline(load_text: Load) -> None:
    campaign = load_text(f'{SEEDS}controls = ["random_reward", "no_update"]\n', f"{TWO}lr = 0.5")
    label = "grpo+toy_index~lr=0.5"
    assert campaign.labels == ["toy_raw+toy_flat", label, f"{label}+random_reward", f"{label}+no_update"]
    assert [each.config.training.control for each in campaign.conditions] == [
        *("", ""),
        *("random_reward", "no_update"),
    ]
    assert [each.config.training.lr for each in campaign.conditions][1:] == [0.5, 0.5, 0.5]
    assert campaign.num_runs == 8
    assert controls_of(campaign) == {"random_reward": 2, "no_update": 2}
    assert list(campaign.content()["conditions"]) == campaign.labels


@pytest.mark.parametrize(
    ("campaign", "conditions", "more", "what"),
    [
        ('controls = ["luck"]', TWO, "", "controls"),
        ('controls = ["no_update", "no_update"]', TWO, "", "no_update is listed more than once"),
        ('controls = ["no_update"]', TWO[: TWO.index("[[", 5)], "", "a control is of a condition that is compared"),
        ("", f'{TWO}control = "no_update"', "", "controls belong to [campaign] controls"),
        ("", TWO, ("--control", "no_update"), "would make every condition a control"),
    ],
)
def test_controls_that_cannot_be(load_text: Load, campaign: str, conditions: str, more: Any, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(f"{SEEDS}{campaign}\n", conditions, arguments=more or ())
    assert any(what in str(problem) for problem in caught.value.problems)
