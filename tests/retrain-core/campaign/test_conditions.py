"""Keys that a condition may set, its label, and the configuration and environment of its runs."""

import json
import re
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.campaign.conditions import ConditionLines, read_conditions
from retrain.campaign.load import gpus_per_run
from retrain.campaign.manifest import new_content
from retrain.campaign.planned import LONGEST_NAME, config_text, plan_runs, run_config, run_environ, run_names
from retrain.kernel.config.load import all_keys, load_config
from retrain.kernel.plugins.discover import load_plugins
from retrain.run.tables import registered_tables
from retrain.text.secrets import LEARNED
from tests.kit.campaigns import conditions

MODES = 'advantage_mode = "grpo"\ntransform_mode = "none"\n'


def read(tables, *texts):
    given_ = [tomllib.loads(MODES + text) for text in texts]
    return read_conditions(given_, all_keys(tables), ConditionLines(None, len(given_)))


@pytest.mark.parametrize(
    ("text", "path", "value", "label"),
    [
        ("lr = 1e-4", "training.lr", 1e-4, "lr=0.0001"),
        ('"training.lr" = 1e-4', "training.lr", 1e-4, "lr=0.0001"),
        ("training.lr = 1e-4", "training.lr", 1e-4, "lr=0.0001"),
        ("[training]\nlr = 1e-4", "training.lr", 1e-4, "lr=0.0001"),
        ("gtpo_beta = 0.5", "gtpo.beta", 0.5, "gtpo_beta=0.5"),
        ("[sepa]\nsteps = 10", "sepa.steps", 10, "sepa_steps=10"),
        ("entropy_mask_rho = 0.2", "algorithm.surprisal_mask_rho", 0.2, "surprisal_mask_rho=0.2"),
        ('reward_type = "math"', "reward.type", "math", "reward_type=math"),
        ("optim_beta1 = 0.8", "optimizer.beta1", 0.8, "optim_beta1=0.8"),
        ('backend = "toy"', "backend.backend", "toy", "backend=toy"),
        ("[backend.options]\na = 1", "backend.options", {"a": 1}, "options.a=1"),
        ('"algorithm.transform_params.cap" = 2', "algorithm.transform_params", {"cap": 2}, "transform_params.cap=2"),
    ],
)
def test_one_key_by_each_of_its_names(tables, text, path, value, label):
    [condition], problems = read(tables, text)
    assert not problems
    assert condition.label == f"grpo+none~{label}"
    assert [s.value for s in condition.settings if s.path == path] == [value]
    assert condition.sets(path)


def test_labels_are_sorted_and_places_are_lines(tables, tmp_path):
    texts = "lr = 1.0\nbatch_size = 2", "batch_size = 2\nlr = 2.0\nbase_url = ''", 'batch_size = 2\n"training.lr" = 1.0'
    (first, second, _), [problem] = read(tables, *texts)
    assert first.label == "grpo+none~batch_size=2,lr=1.0"
    assert second.label == "grpo+none~base_url=,batch_size=2,lr=2.0"
    assert (problem.code, problem.what) == ("campaign.same-condition", f"is the same as condition 1: {first.label}")
    file = tmp_path / "c.toml"
    file.write_text(f"[campaign]\n[[campaign.conditions]]\n{MODES}\n[[ campaign . conditions ]]\n{MODES}lr = 1\n")
    places = ConditionLines(file, 2)
    assert places.of(1) == f"{file}:2 condition 1"
    assert places.of(2, "lr") == places.of(2, "training.lr") == f"{file}:9 condition 2"
    assert ConditionLines(file, 3).of(3) == f"{file} condition 3"


@pytest.mark.parametrize(
    ("text", "code", "fix"),
    [
        ("lrr = 1.0", "config.unknown-key", "'lr'"),
        ("steps = 5", "config.unknown-key", "'sepa_steps'"),
        ("[sepa]\nstps = 5", "config.unknown-key", "'sepa.steps'"),
        ("seed = 5", "campaign.foreign-key", "remove"),
        ('log_dir = "x"', "campaign.foreign-key", "remove"),
        ("[campaign]\nretries = 1", "campaign.foreign-key", "remove"),
        ('resume_from = "x"', "campaign.foreign-key", "remove"),
        ('lr = 1.0\n"training.lr" = 2.0', "campaign.key-set-twice", "remove one"),
        ('"algorithm.advantage_mode" = "maxrl"', "campaign.key-set-twice", "remove one"),
    ],
)
def test_what_a_condition_cannot_set(tables, text, code, fix):
    _, [problem] = read(tables, text)
    assert problem.code == code
    assert fix in problem.fix
    assert "condition 1" in problem.where


ONE = conditions("grpo+toy_flat")
SEEDS = "seeds = [1, 2]\nmax_steps = 4\n"


def configs(campaign, folder=Path("out"), throttle=None):
    return [tomllib.loads(config_text(run_config(run, campaign, throttle))) for run in plan_runs(campaign, folder)]


@given(titles=st.lists(st.text(max_size=200).map(lambda text: f"{text}_s1"), unique=True, max_size=8))
def test_names_are_safe_and_unique(titles):
    names = run_names(titles)
    assert len({name.casefold() for name in names}) == len(titles)
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9+~=,._-]*_s1", name)
        assert name[0] != "."
        assert len(name) <= LONGEST_NAME


def test_plain_names_stay_as_they_are():
    plain = ["maxrl+gtpo_sepa_s42", "grpo+none~lr=0.1,seed=2_s1"]
    assert run_names(plain) == plain
    slash, case, other = run_names(["a+b~path=/etc/x_s1", "a+B_s1", "a+b_s1"])
    assert slash.startswith("a+b~path=-etc-x-")
    assert case.casefold() != other.casefold()


def test_a_run_is_the_base_with_condition_seed_and_folder(load_text):
    one, two = configs(load_text(SEEDS, f"{ONE}lr = 0.5\nmax_tokens = 3\n"))
    assert (one["training"]["seed"], two["training"]["seed"]) == (1, 2)
    assert one["training"] | {"seed": 2} == two["training"]
    assert (one["training"]["lr"], one["training"]["max_tokens"], one["training"]["max_steps"]) == (0.5, 3, 4)
    assert one["algorithm"]["advantage_mode"] == "grpo"
    assert one["logging"]["log_dir"] == "out/runs/grpo+toy_flat~lr=0.5,max_tokens=3_s1"
    assert not {"campaign", "resume"} & set(one)
    assert one["backend"]["throttle_dir"] == ""


def test_wandb_names_groups_and_tags(load_text):
    label = "grpo+toy_flat~lr=0.5,max_tokens=3"
    own = ("--wandb-run-name", "mine", "--wandb-group", "all", "--wandb-tags", "a, b")
    plain, named = load_text(SEEDS, ONE + "lr = 0.5\nmax_tokens = 3\n"), load_text(SEEDS, ONE, arguments=own)
    tags = f"{label.replace(',', ';')},seed1"
    for campaign, wanted in (
        (plain, (f"{label}_s1", label, tags)),
        (named, ("mine", "all", "a,b,grpo+toy_flat,seed1")),
    ):
        logging = configs(campaign)[0]["logging"]
        assert tuple(logging[f"wandb_{name}"] for name in ("run_name", "group", "tags")) == wanted


def test_a_given_adapter_path_gets_the_name_of_the_run_and_the_throttle_is_shared(load_text):
    plain = load_text(SEEDS, ONE, arguments=("--adapter-path", "/a"))
    found = [
        (each["backend"]["adapter_path"], each["backend"]["throttle_dir"])
        for each in configs(plain, throttle=Path("t"))
    ]
    assert found == [("/a/grpo+toy_flat_s1", "t"), ("/a/grpo+toy_flat_s2", "t")]
    own = load_text(SEEDS, ONE, arguments=("--throttle-dir", "mine"))
    assert configs(own, throttle=Path("t"))[0]["backend"]["throttle_dir"] == "mine"


@pytest.mark.parametrize(
    ("devices", "each", "seen", "num_gpus"),
    [
        ("cpu", 1, "cpu", 0),
        ("cpu,cpu", 2, "cpu,cpu", 0),
        ("gpu:3", 1, "gpu:3", 1),
        ("gpu:2,gpu:3", 1, "gpu:0", 1),
        ("gpu:2,gpu:3", 2, "gpu:0,gpu:1", 2),
        ("gpu:4,gpu:5,gpu:6,gpu:7", 2, "gpu:0,gpu:1", 2),
    ],
)
def test_a_run_sees_the_devices_it_is_dealt(load_text, devices, each, seen, num_gpus):
    campaign = load_text(SEEDS, ONE, arguments=("--devices", devices, "--campaign-devices-per-run", str(each)))
    assert {one["backend"]["devices"] for one in configs(campaign)} == {seen}
    assert gpus_per_run(campaign.config, campaign.table) == num_gpus


def test_secrets_travel_by_environment_and_are_in_no_file(load_text, monkeypatch, tmp_path):
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
    assert environ["RETRAIN__ALGORITHM__TRANSFORM_PARAMS"] == '{"api_key": "abc-1234567"}'
    assert environ["RETRAIN__BACKEND__ADAPTER_PATH"] == f"to/sk-planted-0123/{run.name}"
    assert environ["RETRAIN__LOGGING__WANDB_RUN_NAME"] == "of sk-planted-0123"
    (tmp_path / "run.toml").write_text(config_text(tables), encoding="utf-8")
    config, problems = load_config(tmp_path / "run.toml", tables=registered_tables(load_plugins()), environ=environ)
    assert problems == []
    assert config.algorithm.transform_params == {"api_key": "abc-1234567"}
    assert config.backend.adapter_path == f"to/sk-planted-0123/{run.name}"
    LEARNED.values.clear()


def test_variables_of_the_campaign_do_not_change_its_conditions(load_text, monkeypatch):
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
