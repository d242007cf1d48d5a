"""Factorial campaigns and learning-rate sweeps: their conditions, what is wrong with a design, and planned looks."""

import json
from pathlib import Path

import pytest

from retrain.campaign.load import explain, load_campaign, verdict_warnings
from retrain.campaign.looks import Look, PlannedLooks
from retrain.kernel.errors import ConfigError, ResumeError
from tests.kit.campaigns import Finishes, conditions

SEEDS = "seeds = [1, 2]\nmax_steps = 4\n"
FACTORS = 'factors = { advantage_mode = ["grpo", "toy_raw"], transform_mode = ["toy_flat", "toy_index"] }\n'
CELLS = ["grpo+toy_flat", "grpo+toy_index", "toy_raw+toy_flat", "toy_raw+toy_index"]
EFFECTS = ["advantage_mode=toy_raw", "transform_mode=toy_index"]
EFFECTS.append(" × ".join(EFFECTS))
BASE = 'advantage_mode = "grpo"\ntransform_mode = "toy_flat"'


def test_every_combination_is_a_condition(load_text):
    campaign = load_text(SEEDS + FACTORS, "")
    assert campaign.labels == CELLS
    assert campaign.content()["factors"]["advantage_mode"] == dict(
        zip(CELLS, ["grpo"] * 2 + ["toy_raw"] * 2, strict=True)
    )
    assert campaign.effects() == EFFECTS
    assert "factors" not in load_text(SEEDS, conditions(*CELLS)).content()


def test_any_key_can_be_a_factor_and_modes_come_from_the_base(load_text):
    campaign = load_text(SEEDS + "factors = { lr = [0.1, 0.2, 0.4], batch_size = [1, 2] }\n", "", algorithm=BASE)
    assert campaign.labels[:2] == ["grpo+toy_flat~batch_size=1,lr=0.1", "grpo+toy_flat~batch_size=2,lr=0.1"]
    assert [each.config.training.lr for each in campaign.conditions] == [0.1, 0.1, 0.2, 0.2, 0.4, 0.4]
    assert len(campaign.effects()) == 3 + 2
    campaign = load_text(SEEDS + 'factors = { recipe = ["dapo", "cispo"], lr = [0.1, 0.2] }\n', "")
    assert campaign.labels == ["dapo~lr=0.1", "dapo~lr=0.2", "cispo~lr=0.1", "cispo~lr=0.2"]


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ("factors = { lr = [0.1] }", "lr needs two or more different levels"),
        ("factors = { lr = [] }", "lr needs two or more different levels"),
        ("factors = { lr = [0.1, 0.1] }", "lr needs two or more different levels"),
        ("factors = { lrr = [0.1, 0.2], batch_size = [1, 2] }", "unknown key of a condition"),
        ("factors = { lr = [0.1, -0.2] }", "greater than 0"),
        ("factors = { lr = [0.1, 0.2] }\nlr_factors = [2.0]", "remove conditions and lr_factors"),
        ("factors = { lr = [0.1, 0.2], 'training.lr' = [0.1, 0.2] }", "sets training.lr a second time"),
        ("factors = { seed = [1, 2] }", "seeds belong to [campaign] seeds"),
        ("lr_factors = [0.5, 0.0]", "0 is not positive"),
        ("lr_factors = [0.5, 0.5]", "listed more than once"),
    ],
)
def test_what_is_wrong_with_a_design_is_said_once(load_text, factors, said):
    more = conditions(CELLS[0]) if factors.startswith("lr_") else ""
    with pytest.raises(ConfigError) as caught:
        load_text(f"{SEEDS}{factors}\n", more, algorithm=BASE)
    assert [said in problem.what for problem in caught.value.problems].count(True) == 1


def test_factors_and_conditions_exclude_each_other(load_text):
    with pytest.raises(ConfigError, match="factors make all conditions"):
        load_text(SEEDS + FACTORS, conditions(CELLS[0]))


def test_warnings_count_effects(load_text):
    six = FACTORS + "seeds = [1, 2, 3, 4, 5, 6]\nmax_steps = 4\n"
    [said] = verdict_warnings(load_text(six, ""))
    assert "over 3 comparisons" in said
    assert "plan at least 7" in said


def test_a_sweep_multiplies_each_conditions_own_rate(load_text, toy_plugins):
    own = conditions("grpo+toy_flat") + "lr = 0.5\n" + conditions("grpo+toy_index")
    campaign = load_text(SEEDS + "lr_factors = [0.25, 1.0, 4.0]\n", own, training="lr = 0.1")
    label = "grpo+toy_flat~lr={}"
    assert campaign.labels[:2] == [label.format(0.5), "grpo+toy_index"]  # unchanged ones first: the baseline
    assert campaign.labels[2:] == [
        *(label.format(0.125), "grpo+toy_index~lr=0.025"),
        *(label.format(2.0), "grpo+toy_index~lr=0.4"),
    ]
    assert [each.config.training.lr for each in campaign.conditions] == [0.5, 0.1, 0.125, 0.025, 2.0, 0.4]
    assert [each.condition.number for each in campaign.conditions] == [1, 2, 3, 4, 5, 6]
    assert explain(["c.toml"], toy_plugins)["total_runs"] == 12


def test_a_resumed_factorial_is_the_same_and_cannot_get_another_level(play, toy_plugins):
    seeds = "seeds = [1, 2]\n"
    assert len(play(seeds + FACTORS, "")) == 8
    assert play(seeds + FACTORS, "") == []
    campaign = load_campaign(["out/config.toml"], toy_plugins)  # as `--resume out` reads it
    assert campaign.labels == CELLS
    with pytest.raises(ResumeError, match="factors advantage_mode "):
        play(seeds + FACTORS.replace('"toy_raw"]', '"toy_raw", "maxrl"]'), "")
    assert play("seeds = [1, 2, 3]\n" + FACTORS, "") == [f"{label}_s3" for label in CELLS]
    assert json.loads(Path("out/campaign.json").read_text())["factors"] == campaign.levels


def test_every_condition_runs_while_an_effect_is_open(load_text, scheduled):
    plan = '[campaign.plan]\nhypothesis = "either helps"\nlooks = [2, 3, 4]\n'
    campaign = load_text("seeds = [1, 2, 3, 4]\nmax_steps = 4\n" + FACTORS, plan)
    closing = [{EFFECTS[0]: "better"}, {EFFECTS[1]: "futile", EFFECTS[2]: "futile"}]
    followed = []

    def judge(seeds, open_labels):
        followed.append(list(open_labels))
        closed = closing[len(followed) - 1]
        return Look(seeds=seeds, closed=closed, open={each: None for each in open_labels if each not in closed})

    launcher = Finishes()
    scheduled(campaign, launcher, judge=judge).run()
    assert followed == [EFFECTS, EFFECTS[1:]]
    assert sorted(launcher.started) == sorted(f"{label}_s{seed}" for label in CELLS for seed in (1, 2, 3))
    assert PlannedLooks(campaign, judge).open_labels == EFFECTS
