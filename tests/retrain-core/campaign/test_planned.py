"""Names, configurations and environments of the runs."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.campaign.load import Campaign
from retrain.campaign.manifest import new_content
from retrain.campaign.planned import LONGEST_NAME, config_text, plan_runs, run_config, run_environ, run_names
from retrain.kernel.config.load import load_config
from retrain.kernel.plugins.discover import load_plugins
from retrain.run.tables import registered_tables
from retrain.text.secrets import LEARNED

Load = Callable[..., Campaign]
ONE = '[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "toy_flat"\n'
SEEDS = "seeds = [1, 2]\nmax_steps = 4\n"


def configs(campaign: Campaign, folder: Path = Path("out"), throttle: Path | None = None) -> list[dict[str, Any]]:
    return [tomllib.loads(config_text(run_config(run, campaign, throttle))) for run in plan_runs(campaign, folder)]


@given(titles=st.lists(st.text(max_size=200).map(lambda text: f"{text}_s1"), unique=True, max_size=8))
def test_names_are_safe_and_unique(titles: list[str]) -> None:
    names = run_names(titles)
    assert len({name.casefold() for name in names}) == len(titles)
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9+~=,._-]*_s1", name)
        assert name[0] != "."
        assert len(name) <= LONGEST_NAME


def test_plain_names_stay_as_they_are() -> None:
    assert run_names(["maxrl+gtpo_sepa_s42", "grpo+none~lr=0.1,seed=2_s1"]) == [
        *("maxrl+gtpo_sepa_s42", "grpo+none~lr=0.1,seed=2_s1")
    ]
    slash, case, other = run_names(["a+b~path=/etc/x_s1", "a+B_s1", "a+b_s1"])
    assert slash.startswith("a+b~path=-etc-x-")
    assert case.casefold() != other.casefold()


def test_a_run_is_the_base_with_condition_seed_and_folder(load_text: Load) -> None:
    one, two = configs(load_text(SEEDS, f"{ONE}lr = 0.5\nmax_tokens = 3\n"))
    assert (one["training"]["seed"], two["training"]["seed"]) == (1, 2)
    assert one["training"] | {"seed": 2} == two["training"]
    assert (one["training"]["lr"], one["training"]["max_tokens"], one["training"]["max_steps"]) == (0.5, 3, 4)
    assert one["algorithm"]["advantage_mode"] == "grpo"
    assert one["logging"]["log_dir"] == "out/runs/grpo+toy_flat~lr=0.5,max_tokens=3_s1"
    assert not {"campaign", "resume"} & set(one)
    assert one["backend"]["throttle_dir"] == ""


def test_wandb_names_groups_and_tags(load_text: Load) -> None:
    [one, _] = configs(load_text(SEEDS, ONE + "lr = 0.5\nmax_tokens = 3\n"))
    label = "grpo+toy_flat~lr=0.5,max_tokens=3"
    assert one["logging"]["wandb_run_name"] == f"{label}_s1"
    assert one["logging"]["wandb_group"] == label
    assert one["logging"]["wandb_tags"] == f"{label.replace(',', ';')},seed1"
    own = ("--wandb-run-name", "mine", "--wandb-group", "all", "--wandb-tags", "a, b")
    [one, _] = configs(load_text(SEEDS, ONE, arguments=own))
    assert one["logging"]["wandb_run_name"] == "mine"
    assert one["logging"]["wandb_group"] == "all"
    assert one["logging"]["wandb_tags"] == "a,b,grpo+toy_flat,seed1"


def test_a_given_adapter_path_gets_the_name_of_the_run(load_text: Load) -> None:
    one, two = configs(load_text(SEEDS, ONE, arguments=("--adapter-path", "/a")))
    assert (one["backend"]["adapter_path"], two["backend"]["adapter_path"]) == (
        *("/a/grpo+toy_flat_s1", "/a/grpo+toy_flat_s2"),
    )


def test_the_throttle_is_shared_unless_there_is_one(load_text: Load) -> None:
    assert configs(load_text(SEEDS, ONE), throttle=Path("t"))[0]["backend"]["throttle_dir"] == "t"
    own = load_text(SEEDS, ONE, arguments=("--throttle-dir", "mine"))
    assert configs(own, throttle=Path("t"))[0]["backend"]["throttle_dir"] == "mine"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--devices", "cpu"), "cpu"),
        (("--devices", "gpu:3"), "gpu:3"),
        (("--devices", "gpu:2,gpu:3"), "gpu:0"),
        (("--devices", "gpu:2,gpu:3", "--campaign-devices-per-run", "2"), "gpu:0,gpu:1"),
    ],
)
def test_a_run_sees_the_devices_it_is_dealt(load_text: Load, arguments: tuple[str, ...], wanted: str) -> None:
    assert {one["backend"]["devices"] for one in configs(load_text(SEEDS, ONE, arguments=arguments))} == {wanted}


def test_secrets_travel_by_environment(load_text: Load) -> None:
    campaign = load_text(
        SEEDS,
        ONE,
        arguments=(
            "--transform-param",
            "api_key=abc-123",
        ),
    )
    run = plan_runs(campaign, Path("out"))[0]
    tables = run_config(run, campaign, None)
    assert "abc-123" not in config_text(tables)
    environ = run_environ(tables, campaign.keys, {})
    assert environ == {"RETRAIN__ALGORITHM__TRANSFORM_PARAMS": '{"api_key": "abc-123"}'}


def test_secrets_of_the_environment_travel_too(
    load_text: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MY_SERVICE_KEY", "sk-planted-0123")
    arguments = ("--adapter-path", "to/sk-planted-0123", "--wandb-run-name", "of sk-planted-0123")
    secret = 'transform_params = { api_key = "abc-1234567" }\n'
    campaign = load_text(SEEDS, ONE + secret, arguments=arguments)
    run = plan_runs(campaign, Path("out"))[0]
    tables = run_config(run, campaign, None)
    content = new_content(campaign, [run], datetime.now(UTC))
    written = config_text(tables) + run.name + json.dumps([campaign.content(), content])
    assert "planted" not in written
    assert "abc-1234567" not in written
    environ = run_environ(tables, campaign.keys, {})
    assert environ["RETRAIN__BACKEND__ADAPTER_PATH"] == f"to/sk-planted-0123/{run.name}"
    assert environ["RETRAIN__LOGGING__WANDB_RUN_NAME"] == "of sk-planted-0123"
    (tmp_path / "run.toml").write_text(config_text(tables), encoding="utf-8")
    config, problems = load_config(tmp_path / "run.toml", tables=registered_tables(load_plugins()), environ=environ)
    assert problems == []
    assert config.algorithm.transform_params == {"api_key": "abc-1234567"}
    assert config.backend.adapter_path == f"to/sk-planted-0123/{run.name}"
    LEARNED.values.clear()


def test_variables_of_the_campaign_do_not_change_its_conditions(
    load_text: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_ = {"RETRAIN__TRAINING__LR": "0.25", "retrain_x": "1", "RETRAIN__CAMPAIGN__RETRIES": "3"}
    for name, value in given_.items():
        monkeypatch.setenv(name, value)
    campaign = load_text(SEEDS, ONE + "lr = 0.5\n\n" + ONE)
    assert campaign.table.retries == 3
    found = []
    for run in plan_runs(campaign, Path("out"))[::2]:
        environ = run_environ(run_config(run, campaign, None), campaign.keys, given_)
        found.append(environ["RETRAIN__TRAINING__LR"])
        assert set(environ) == {"RETRAIN__TRAINING__LR", "RETRAIN__CAMPAIGN__RETRIES"}
    assert found == ["0.5", "0.25"]
