"""Options and the keys of other tables: what cannot be honoured is refused before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import pytest
import zmq
from pydantic import ValidationError
from transformers import AutoTokenizer

from retrain.api import BackendError, Config, ConfigError, Kind, PluginContext, Plugins, Seeds, load_plugins
from retrain.kernel.config.load import load_config
from retrain.kernel.plugins.first_party import promised_options
from retrain.run.check import check
from retrain.run.tables import read_config, registered_tables
from retrain_prime_rl import plugin
from retrain_prime_rl.backend import PrimeRlBackend, create_backend, task_name
from retrain_prime_rl.options import PrimeRlOptions, output_folder
from tests.kit.inference_server import serving
from tests.kit.toy_policy import ToyModel

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


# ---------------------------------------------------------------- the factory, with a real inference server


@pytest.fixture
def create(tmp_path: Path, configured: Callable[..., Config]) -> Iterator[Callable[..., PrimeRlBackend]]:
    """`create(toml, option=value)`: the backend of a configuration, closed when the test is over."""
    local = pytest.importorskip("retrain_local.plugin", reason="the tiny model comes with retrain-local")
    tiny = str(local.BUILTIN_MODELS["tiny"])
    with serving(ToyModel(root=tiny)) as server, ExitStack() as opened:

        def build(toml: str = "", url: str = server.url, **options: object) -> PrimeRlBackend:
            options = {"output_dir": str(tmp_path / "run_1"), "sync_wait_s": 0, "sync_timeout": "stale"} | options
            if options.get("wire") == "scalar":  # as its own orchestrator leaves it
                (tmp_path / "run_1" / "control").mkdir(parents=True, exist_ok=True)
                (tmp_path / "run_1" / "control" / "orch.toml").touch()
            tables = f'[model]\nmodel = "builtin:tiny"\n[inference]\nengine = "vllm"\nurl = "{url}"\nretry_s = 5\n'
            context = PluginContext(
                config=configured(tables + toml, **options),
                seeds=Seeds(1),
                plugins=load_plugins(environ={}),
                params=PrimeRlOptions(**options),
                tokenizer=AutoTokenizer.from_pretrained(tiny),
            )
            return opened.enter_context(closing(create_backend(context)))

        yield build


def test_samples_of_the_older_wire_become_one_file(create, make_batch, tmp_path):
    backend = create(wire="scalar")
    assert not backend.capabilities.preserves_token_advantages
    backend.train(make_batch([6, 9, 5], varying=False))
    (file,) = (tmp_path / "run_1" / "rollouts" / "step_0").iterdir()
    assert file.name == "rollouts.bin"
    samples, step = msgspec.msgpack.decode(file.read_bytes())
    assert (len(samples), step) == (3, 0)


def test_samples_of_the_older_wire_are_pushed_under_the_name_of_the_folder(create, make_batch, free_ports):
    with zmq.Context() as context, context.socket(zmq.PULL) as packer:
        packer.bind(f"tcp://127.0.0.1:{free_ports}")
        made = create(wire="scalar", transport="zmq", zmq_host="127.0.0.1", zmq_port=free_ports)
        made.train(make_batch([6], varying=False))
        assert packer.poll(20_000)
        assert packer.recv_multipart()[0] == b"run_1"


def test_each_rank_has_a_file_and_the_next_step_is_found_on_a_resume_and_refused_to_a_new_run(
    create, make_batch, tmp_path
):
    for _ in range(2):
        backend = create("[resume]\nfrom = 'earlier'\n", data_world_size=2)
        assert backend.capabilities.preserves_token_advantages
        backend.train(make_batch([6, 9, 5]))
    files = (tmp_path / "run_1" / "rollouts" / "step_2").iterdir()
    assert sorted(file.name for file in files) == ["rank_0.bin", "rank_1.bin"]
    with pytest.raises(ConfigError, match="its trainer was sent 2 steps"):
        create()


def test_ports_are_free_again_when_the_inference_server_cannot_be_reached(create, free_ports):
    options = {"transport": "zmq", "zmq_port": free_ports}
    with pytest.raises(BackendError, match="the list of models failed"):
        create(url="http://127.0.0.1:1", **options)
    create(**options)
