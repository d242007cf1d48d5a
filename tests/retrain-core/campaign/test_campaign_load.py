"""A campaign from file, environment and command line; all its problems at once."""

import json
import sys
from pathlib import Path

import pytest

from retrain.campaign.load import controls_of, warnings_of
from retrain.campaign.planned import config_text, plan_runs, run_config
from retrain.kernel.errors import ConfigError
from retrain.run.configure import load_checked
from tests.kit.campaigns import conditions
from tests.kit.problems import codes_in
from tests.kit.shared import first_or_long

ONE, TWO = conditions("toy_raw+toy_flat"), conditions("toy_raw+toy_flat", "grpo+toy_index")
RECIPES = """
conditions = [
  { recipe = "dapo" },
  { recipe = "cispo", lr = 0.5, surprisal_mask_rho = 0.2 },
  { recipe = "dapo", "algorithm.clip_eps" = 0.1 },
  { advantage_mode = "grpo", transform_mode = "toy_flat" },
]
"""
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
def test_where_the_number_of_steps_comes_from(load_text, own, base, arguments, wanted):
    campaign = load_text(SEEDS + own, f"{TWO}max_steps = 11", training=base, arguments=arguments)
    assert campaign.max_steps == wanted
    assert [campaign.steps_of(condition) for condition in campaign.conditions] == [wanted, 11]


def test_overrides_reach_every_condition_and_controls_are_conditions(load_text):
    campaign = load_text(SEEDS, f"{TWO}lr = 0.5", arguments=("--lr", "0.25", "--data-opt", "count=7"))
    assert [condition.config.training.lr for condition in campaign.conditions] == [0.25, 0.5]
    assert [condition.config.data.options for condition in campaign.conditions] == [{"count": 7}] * 2
    campaign = load_text(f'{SEEDS}controls = ["random_reward", "no_update"]\n', f"{TWO}lr = 0.5")
    label = "grpo+toy_index~lr=0.5"
    assert campaign.labels == ["toy_raw+toy_flat", label, f"{label}+random_reward", f"{label}+no_update"]
    found = [(each.config.training.control, each.config.training.lr) for each in campaign.conditions][1:]
    assert found == [("", 0.5), ("random_reward", 0.5), ("no_update", 0.5)]
    assert campaign.num_runs == 8
    assert controls_of(campaign) == {"random_reward": 2, "no_update": 2}
    assert list(campaign.content()["conditions"]) == campaign.labels


def test_every_problem_at_once_with_its_place(load_text):
    given = TWO + 'transform_params = 3\nlrr = 1.0\nbatch_size = 0\nreward_type = "mtch"\n'
    with pytest.raises(ConfigError) as caught:
        load_text('seeds = [1, 1]\nlauncher = "subproces"\nretrys = 1', given, "[traning]\nlr = 1.0\n")
    told = str(caught.value)
    for wanted in (
        *("1 is listed more than once", "'subproces'", "retrys: unknown key", "[traning]: unknown table"),
        *("c.toml:14 condition 2 lrr: unknown key", "c.toml:15 condition 2 [training] batch_size", "'mtch'"),
        "c.toml:13 condition 2 [algorithm] transform_params",
    ):
        assert wanted in told, told
    assert told.count("unknown table") == 1  # not once per condition


PLAN = '[campaign.plan]\nhypothesis = "h"\nbaseline = "nobody"\n'
RECIPE, AGAIN = 'conditions = [{{ recipe = "{}" }}]', 'conditions = [{ recipe = "dapo" }, { recipe = "dapo" }]'
OTHERS = [  # campaign, conditions, keys of [algorithm], flags, a code or words
    ("seeds = []", "", "", "", "at least one seed"),
    ("seeds = [-1]", "", "", "", "-1 is not a seed"),
    ("conditions = []", "", "", "", "at least one condition"),
    ("", '[[campaign.conditions]]\nadvantage_mode = "grpo"\n', "", "", "condition 1 needs transform_mode"),
    ("", conditions("grpo+no"), "", "", "'no'"),
    ("[campaign.launcher_options]\nx = 1\n", "", "", "", "unknown option 'x'"),
    ("[campaign.plan]\nalpha = 0.5\n", "", "", "", "Field required"),
    (SEEDS, TWO, "", "--sed 3", "unknown flag --sed"),
    (SEEDS, RECIPE.format("dapp"), "", "", "no recipe named 'dapp'"),
    (SEEDS, RECIPE.format(""), "", "", "condition 1 needs recipe"),
    ('controls = ["luck"]', TWO, "", "", "controls"),
    ('controls = ["no_update", "no_update"]', TWO, "", "", "no_update is listed more than once"),
]
REFUSED = [
    (PLAN, "", "", "", "plan.unknown-baseline"),
    (SEEDS, TWO, "", "--seed 3", "campaign.seed-of-runs"),
    (SEEDS, TWO, "", "--advantage-mode grpo", "campaign.mode-of-conditions"),
    (SEEDS, TWO, "", "--transform-mode none", "campaign.mode-of-conditions"),
    (SEEDS, RECIPES, "", "--recipe dapo", "campaign.mode-of-conditions"),
    (SEEDS, TWO, "", "--algorithm-mode maxrl_gtpo", "campaign.algorithm-mode"),
    (SEEDS, TWO, "", "--devices gpu:0,cpu", "device.not-gpus"),
    (SEEDS, TWO, "", "--devices cpu,cpu", "device.not-gpus"),
    (SEEDS, TWO, "", "--devices gpu:0,gpu:1 --campaign-devices-per-run 3", "device.too-few"),
    (SEEDS, AGAIN, "", "", "campaign.same-condition"),
    (SEEDS, RECIPES, 'advantage_mode = "maxrl"', "", "campaign.beats-recipe"),
    ('controls = ["no_update"]', ONE, "", "", "campaign.control-of-baseline"),
    ("", f'{TWO}control = "no_update"', "", "", "campaign.foreign-key"),
    ("", TWO, "", "--control no_update", "campaign.all-controls"),
]


@pytest.mark.parametrize(("campaign", "given", "algorithm", "flags", "wanted"), [*REFUSED, *first_or_long(OTHERS)])
def test_what_is_refused(load_text, campaign, given, algorithm, flags, wanted):
    seeds = "" if "seeds" in campaign else SEEDS
    with pytest.raises(ConfigError) as caught:
        load_text(f"{seeds}{campaign}\n", given, algorithm=algorithm, arguments=tuple(flags.split()))
    assert wanted in (codes_in(caught) if "." in wanted else str(caught.value))


def test_a_condition_may_name_only_a_recipe(load_text):
    campaign = load_text(SEEDS, RECIPES)
    wanted = ["dapo", "cispo~lr=0.5,surprisal_mask_rho=0.2", "dapo~clip_eps=0.1", "grpo+toy_flat"]
    assert campaign.labels == wanted
    dapo, _, narrow, plain = (each.config for each in campaign.conditions)
    assert (dapo.algorithm.loss, dapo.algorithm.clip_eps, dapo.algorithm.clip_eps_high) == ("ppo", 0.2, 0.28)
    assert (narrow.algorithm.clip_eps, narrow.algorithm.clip_eps_high) == (0.1, 0.28)
    assert dapo.training.overlong == "mask"
    assert (plain.algorithm.recipe, plain.algorithm.loss) == ("", "importance_sampling")
    assert len({json.dumps(values, default=str) for values in campaign.content()["conditions"].values()}) == 4
    told = warnings_of(load_text(SEEDS, RECIPES, arguments=("--loss", "cispo")))
    assert "dapo: the campaign sets loss, uncertainty_kind, against its recipe" in told


@pytest.mark.long
def test_the_run_of_a_recipe_has_its_values_and_label(load_text, toy_plugins, tmp_path):
    campaign = load_text(SEEDS, RECIPES)
    for run in plan_runs(campaign, tmp_path):
        file = tmp_path / "run.toml"
        file.write_text(config_text(run_config(run, campaign, None)))
        checked = load_checked([str(file)], toy_plugins)
        algorithm = run.condition.config.algorithm
        assert checked.config.algorithm.model_dump() == algorithm.model_dump()
        assert checked.flow.condition.startswith(algorithm.recipe or "grpo+toy_flat")


def test_explain_shows_the_shape_and_the_values_of_recipes(write, command):
    given = RECIPES.replace('recipe = "dapo" }', 'recipe = "dapo", max_steps = 9 }')
    result = command("explain", str(write(SEEDS + "max_steps = 4", given)), "--json", "--lr", "0.25")
    assert (result.code, result.err) == (0, "")
    content = json.loads(result.out)
    assert content["mode"] == "campaign"
    assert content["conditions"][::3] == ["dapo~max_steps=9", "grpo+toy_flat"]
    wanted = {"seeds": [1, 2], "max_steps": 4, "total_runs": 8, "total_steps": 42, "backend": "toy"}
    assert {name: content[name] for name in wanted} == wanted
    assert any("no verdict is possible" in warning for warning in content["warnings"])
    assert content["origins"]["training.lr"] == {"value": 0.25, "origin": "--lr"}
    recipes = content["recipes"]
    assert list(recipes) == content["conditions"][:3]
    assert recipes["dapo~max_steps=9"]["algorithm.clip_eps_high"] == {"value": 0.28, "origin": "recipe dapo"}
    assert "algorithm.clip_eps" not in recipes["dapo~clip_eps=0.1"]
    text = command("explain", "c.toml").out
    assert "conditions           : dapo~max_steps=9, cispo" in text
    assert "Values that dapo~max_steps=9 takes from its recipe:" in text
    assert 'algorithm.loss       = "ppo"  (recipe dapo)' in text


@pytest.mark.long
def test_what_may_surprise_is_told(load_text, monkeypatch):
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


def test_the_command_wants_a_campaign_and_its_part_of_retrain(write, command, monkeypatch):
    file = write()
    Path("plain.toml").write_text("[training]\nlr = 1.0\n")
    result = command("campaign", "plain.toml")
    assert (result.code, codes_in(result.err)) == (2, ["campaign.no-table"])
    monkeypatch.setitem(sys.modules, "retrain.campaign", None)
    result = command(str(file))
    assert result.code == 2
    assert "[campaign]: unknown table" in result.err
    assert "reinstall retrain-core" in result.err
    assert not Path("out").exists()
