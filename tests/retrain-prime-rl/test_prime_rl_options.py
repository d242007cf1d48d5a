"""Options and the keys of other tables: what cannot be honoured is refused before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from retrain.api import Config, ConfigError, Kind, Plugins, load_plugins
from retrain.kernel.config.load import load_config
from retrain.kernel.plugins.first_party import promised_options
from retrain.run.check import check
from retrain.run.tables import read_config, registered_tables
from retrain_prime_rl import plugin
from retrain_prime_rl.backend import task_name
from retrain_prime_rl.options import PrimeRlOptions, output_folder

ROOM = '[inference]\nengine = "vllm"\n[training]\nmax_tokens = 64\n'


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins(environ={})


@pytest.fixture
def configured(tmp_path: Path, plugins: Plugins) -> Callable[..., Config]:
    """The configuration in a TOML text with these options."""

    def make(toml: str, **options: object) -> Config:
        file = tmp_path / "retrain.toml"
        listed = {"output_dir": str(tmp_path / "out")} | options
        lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in listed.items())
        text = f'[backend]\nbackend = "prime_rl"\n[backend.options]\n{lines}{toml}'
        file.write_text(text, encoding="utf-8")
        config, problems = load_config(file, tables=registered_tables(plugins))
        assert not problems
        return config

    return make


@pytest.fixture
def refused(plugins: Plugins) -> Callable[[Config], str]:
    """What the kernel's check says of a configuration, before anything is loaded; empty when nothing is wrong."""

    def check_all(config: Config) -> str:
        return "\n".join(map(str, check(config, plugins, registered_tables(plugins))[1]))

    return check_all


def test_defaults_are_those_of_the_documentation():
    ours, documented = PrimeRlOptions(), promised_options()["prime_rl"]
    assert len(documented) == 7
    assert {name: getattr(ours, name) for name in documented} == documented


@pytest.mark.parametrize(
    "options",
    [
        *({"transport": "carrier pigeon"}, {"sync_timeout": "ignore"}, {"wire": "0.8"}, {"zmq_prot": 5}),
        *({"zmq_port": 0}, {"zmq_port": 65535}, {"zmq_hwm": 0}, {"data_world_size": 0}),
        *({"sync_wait_s": -1}, {"sync_wait_s": float("nan")}, {"sync_poll_s": 0}),
        *({"first_step": -2}, {"first_step": 0}, {"seq_len": 100, "pad_to_multiple_of": 64}),
        {"strict_advantages": False},  # it would train on averages
    ],
    ids=str,
)
def test_values_without_meaning_are_refused(options):
    with pytest.raises(ValidationError):
        PrimeRlOptions(**options)


def test_the_smallest_useful_configuration_passes_with_defaults_written_out(configured, refused):
    assert refused(configured(ROOM)) == ""
    assert refused(configured(ROOM + "lr = 4e-5\n[model]\nlora_rank = 32\n")) == ""


@pytest.mark.parametrize(
    ("table", "line", "there"),
    [
        ("training", "lr = 1e-5", "set [optim] lr in the trainer's own TOML"),
        ("training", "weight_decay = 0.1", "set [optim] weight_decay"),
        ("optimizer", "beta2 = 0.99", "set [optim] betas2"),
        ("optimizer", "grad_clip_norm = 1.0", "set [optim] max_norm"),
        ("model", "lora_rank = 8", "set [model.lora] rank"),
        ("model", "lora_rank = 0", "or no [model.lora] to train all weights"),
        ("lora", "alpha = 8", "set [model.lora] alpha"),
        ("algorithm", 'loss = "ppo"', '[loss] type = "custom"'),
        ("algorithm", "tis_cap = 2.0", '[loss] type = "custom"'),
        ("algorithm", 'aggregation = "constant"', "divides by the tokens of the step"),
    ],
)
def test_what_only_the_trainers_own_file_can_set_is_refused_by_name(configured, refused, table, line, there):
    text = refused(configured(ROOM + ("" if table == "training" else f"[{table}]\n") + line + "\n"))
    assert f"[{table}] {line.split()[0]}" in text
    assert "retrain.toml:" in text
    assert "fix: remove it here; " in text
    assert there in text
    assert text.count("fix: ") == 1


def test_a_recipe_is_refused_with_the_keys_that_make_it_work(plugins, refused, tmp_path):
    """Its loss is the trainer's affair; advantages, truncated completions and dynamic sampling are ours."""
    file, tables = tmp_path / "retrain.toml", registered_tables(plugins)
    start = f'[backend]\nbackend = "prime_rl"\noptions = {{output_dir = "{tmp_path}"}}\n{ROOM}[algorithm]\n'
    names = [entry.spec.name for entry in plugins.registered(Kind.RECIPE)]
    assert {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp"} <= set(names)
    for name in names:
        file.write_text(start + f'recipe = "{name}"\n')
        config, problems = read_config(file, plugins, tables)
        assert not problems
        text = refused(config)
        assert 'fix: write loss = "importance_sampling" and aggregation = "token_mean" next to the recipe' in text
        assert "remove it" not in text  # nobody wrote it
        file.write_text(start + f'recipe = "{name}"\nloss = "importance_sampling"\naggregation = "token_mean"\n')
        config, problems = read_config(file, plugins, tables)
        assert not problems
        assert refused(config) == ""
        assert config.algorithm.advantage_mode != "maxrl"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, '[rollout_transport] type = "filesystem" (its'),
        ({"transport": "zmq", "zmq_port": 6}, '"zmq", port = 6 (its'),
    ],
)
def test_explain_says_what_the_trainers_own_file_must_say(configured, options, said):
    told = plugin.retrain_explain(configured(ROOM, **options))["prime_rl_trainer"]
    assert said in told
    assert "no max_steps" in told


def test_all_problems_come_at_once(configured, refused):
    text = refused(configured('[training]\nlr = 1.0\n[inference]\nengine = "sglang"\n', output_dir=""))
    assert all(word in text for word in ("lr", "engine = 'sglang'", "max_tokens", "output_dir"))


def test_another_backend_is_left_alone(configured, refused):
    pytest.importorskip("retrain_local", reason="the other backend is that of retrain-local")
    config = configured("[training]\nlr = 1.0\n")
    table = config.backend.model_copy(update={"backend": "local", "options": {}})
    local = Config(tables={**config.tables, "backend": table})
    assert refused(local) == ""


def test_another_engine_is_refused_even_by_default_so_that_records_say_who_sampled(configured, refused):
    for table in ("", '[inference]\nengine = "sglang"\n'):
        assert 'set engine = "vllm"' in refused(configured("[training]\nmax_tokens = 64\n" + table))


@pytest.mark.parametrize(("max_tokens", "seq_len"), [(2048, 2048), (10240, 2048)])
def test_completions_must_leave_room_for_their_prompt(configured, refused, max_tokens, seq_len):
    assert f"seq_len = {seq_len}" in refused(configured(f"[training]\nmax_tokens = {max_tokens}\n", seq_len=seq_len))


def test_token_credit_is_refused_on_the_older_wire_before_anything_is_sampled(configured, refused):
    for name in ("gtpo", "gtpo_sepa", "gtpo_hicra"):
        text = refused(configured(ROOM + f'[algorithm]\ntransform_mode = "{name}"\n', wire="scalar"))
        assert name in text
        assert 'wire = "per_token"' in text
    for wire in ("scalar", "per_token"):
        assert refused(configured(ROOM + '[algorithm]\ntransform_mode = "none"\n', wire=wire)) == ""


def test_output_dir_may_be_given_as_adapter_path_and_must_be_given(configured, tmp_path):
    config = configured(ROOM)
    old_way = config.backend.model_copy(update={"adapter_path": f"{tmp_path}/a"})
    given = Config(tables={**config.tables, "backend": old_way})
    assert output_folder(given, PrimeRlOptions()) == (tmp_path / "a").resolve()
    assert output_folder(given, PrimeRlOptions(output_dir=f"{tmp_path}/b")) == (tmp_path / "b").resolve()
    with pytest.raises(ConfigError, match="needs output_dir"):
        output_folder(config, PrimeRlOptions())


def test_the_task_is_named_after_its_source_but_not_by_the_trainers_own_word_for_everything(configured):
    for source in ("arithmetic", "files"):
        assert task_name(configured(f'[data]\nsource = "{source}"\n')) == source
    assert task_name(configured('[environment]\nprovider = "verifiers"\nid = "all"\n')) == "all_tasks"
