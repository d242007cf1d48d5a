"""Options and the keys of other tables: what cannot be honoured is refused before anything is loaded."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from pydantic import ValidationError
from transformers import AutoTokenizer

from retrain.api import BackendError, Config, ConfigError, Kind, PluginContext, Plugins, Seeds, load_plugins
from retrain.cli.command_line import run
from retrain.kernel.config.load import load_config
from retrain.kernel.plugins.first_party import promised_options
from retrain.run.check import check
from retrain.run.configure import load_checked
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
        if config.distil.teacher:
            assert "gives no log-probabilities of a teacher" in text
            continue
        assert 'fix: write loss = "importance_sampling" and aggregation = "token_mean" next to the recipe' in text
        assert "remove it" not in text  # nobody wrote it
        beside = 'loss = "importance_sampling"\naggregation = "token_mean"\n'
        beside += 'is_mode = "truncate"\nis_bounds = []\n' if name == "icepop" else ""
        file.write_text(start + f'recipe = "{name}"\n{beside}')
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


def test_another_backend_is_left_alone(configured, refused):
    pytest.importorskip("retrain_local", reason="the other backend is that of retrain-local")
    config = configured("[training]\nlr = 1.0\n")
    table = config.backend.model_copy(update={"backend": "local", "options": {}})
    local = Config(tables={**config.tables, "backend": table})
    assert refused(local) == ""


def test_another_engine_is_refused_even_by_default_and_all_problems_come_at_once(configured, refused):
    assert 'set engine = "vllm"' in refused(configured("[training]\nmax_tokens = 64\n"))
    text = refused(configured('[training]\nlr = 1.0\n[inference]\nengine = "sglang"\n', output_dir=""))
    assert all(word in text for word in ("lr", "engine = 'sglang'", "max_tokens", "output_dir"))


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


# ---------------------------------------------------------------- the files of retrain prime-rl-config


OPTIONS = {"output_dir": "/shared/out", "seq_len": 8192, "data_world_size": 4}
RUN = '[inference]\nengine = "vllm"\nurl = "{url}"\n[training]\nmax_tokens = 6144\n{training}'
URL = "http://gpu-1:8000"
FILES = ("inference.toml", "start.md", "trainer.toml")


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Writes a run with these options and the files for it; the exit code of the command."""
    monkeypatch.chdir(tmp_path)

    def write(*flags: str, url: str = URL, training: str = "", more: str = "", **options: Any) -> int:
        lines = [f"{name} = {json.dumps(value)}" for name, value in (OPTIONS | options).items()]
        head = '[backend]\nbackend = "prime_rl"\n[backend.options]\n' + "\n".join(lines)
        Path("run.toml").write_text(f"{head}\n{RUN.format(url=url, training=training)}{more}", encoding="utf-8")
        return run(["prime-rl-config", "run.toml", *flags])

    return write


def read(name: str, folder: str = "prime-rl") -> dict[str, Any]:
    """One of the files."""
    return tomllib.loads(Path(folder, name).read_text(encoding="utf-8"))


def typed(heading: str) -> list[str]:
    """The lines to type below a heading of start.md."""
    section = Path("prime-rl/start.md").read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    return section.split("```bash\n")[1].split("\n```")[0].splitlines() if "```" in section else []


def test_the_trainer_is_told_what_the_run_records(written):
    assert written() == 0
    config = load_checked(["run.toml"], load_plugins(environ={})).config
    trainer = read("trainer.toml")
    assert trainer["output_dir"] == "/shared/out"
    assert "max_steps" not in trainer  # the trainer would end before the last step reaches it
    assert trainer["model"]["name"] == config.model.model
    assert trainer["model"]["seq_len"] == 8192
    assert trainer["model"]["lora"] == {"rank": config.model.lora_rank, "alpha": 2 * config.model.lora_rank}
    assert trainer["optim"] == {
        "type": "adamw",
        "lr": config.training.lr,
        "weight_decay": config.training.weight_decay,
        "betas1": config.optimizer.beta1,
        "betas2": config.optimizer.beta2,
        "max_norm": "None",  # grad_clip_norm = 0: not clipped
    }
    assert trainer["rollout_transport"] == {"type": "filesystem"}
    assert trainer["weight_broadcast"] == {"type": "filesystem"}


def test_the_server_samples_for_the_trainer(written):
    assert written("--inference-gpus", "2") == 0
    server = read("inference.toml")
    assert server["router"] == "None"  # weights go to the address that samples
    assert server["server"] == {"host": "0.0.0.0", "port": 8000}
    wanted = {"max_model_len": 8192, "logprobs_mode": "processed_logprobs", "enable_lora": True, "max_lora_rank": 32}
    assert server["vllm"].items() >= (wanted | {"data_parallel_size": 2}).items()
    assert written("--all-weights", "--force") == 0
    trainer, server = read("trainer.toml"), read("inference.toml")
    assert "lora" not in trainer["model"]
    assert "lr" not in trainer["optim"]
    assert "enable_lora" not in server["vllm"]


def test_weights_go_to_the_engines_behind_a_router(written):
    assert written("--set", "inference.admin_url=http://gpu-1:8100") == 0
    server = read("inference.toml")
    assert (server["server"]["port"], server["backend_port"]) == (8000, 8100)
    assert "router" not in server  # its own default
    assert written("--force", "--set", "inference.admin_url=http://gpu-2:8100,http://gpu-3:8100") == 0
    server = read("inference.toml")
    assert (server["server"]["port"], server["router"]) == (8100, "None"), "bare engines behind a router of one's own"
    assert [line.rpartition("# on ")[2] for line in typed("Several machines")[:2]] == ["gpu-2", "gpu-3"]


@pytest.mark.parametrize(
    ("host", "connects_to"), [("localhost", "localhost"), ("0.0.0.0", "localhost"), ("10.0.0.7", "10.0.0.7")]
)
def test_sockets_are_where_the_run_binds_them(written, host, connects_to):
    assert written(transport="zmq", zmq_host=host, zmq_port=6001, zmq_hwm=3) == 0
    transport = read("trainer.toml")["rollout_transport"]
    assert transport == {"type": "zmq", "host": connects_to, "port": 6001, "hwm": 3}
    line = next(line for line in typed("Several machines") if "torchrun" in line)
    assert line.endswith("--rollout_transport.host RUN") == (connects_to == "localhost")


@pytest.mark.parametrize(
    ("training", "checkpoints"),
    [
        ("save_every = 5\n", {"interval": 5}),
        ("save_every = 5\nkeep_last = 2\n", {"interval": 5, "keep_last": 2}),
        ("save_every = 5\nkeep_last = 2\nkeep_best = 1\n", {"interval": 5}),  # which one is best, only the run knows
        ("save_every = 5\nminibatches = 2\nepochs = 3\n", {"interval": 30}),  # optimizer steps
        ("save_every = 0\n", None),
    ],
)
def test_both_sides_save_after_the_same_steps(written, training, checkpoints):
    assert written(training=training) == 0
    assert read("trainer.toml").get("ckpt") == checkpoints
    assert bool(typed("After a stop")) == (checkpoints is not None)


def test_what_explain_refuses_is_refused_in_the_same_words(written, capsys):
    flags = ("--lr", "1e-5", "--lora-rank", "8", "--loss", "ppo", "--max-tokens", "9000")
    assert written(*flags) == 2
    ours = capsys.readouterr().err
    assert run(["explain", "run.toml", *flags]) == 2
    assert ours == capsys.readouterr().err
    assert "set [optim] lr in the trainer's own TOML" in ours
    assert not Path("prime-rl").exists()


@pytest.mark.parametrize(
    ("flags", "options", "more", "said"),
    [
        ([], {"wire": "scalar"}, "[algorithm]\ntransform_mode = 'none'\n", 'set wire = "per_token"'),
        ([], {}, "[campaign]\nseeds = [1, 2]\n", "give the file of one run"),
        (["--context-parallel", "2"], {}, "", "set pad_to_multiple_of = 2"),
        ([], {"data_world_size": 12}, "", "12 GPUs of the trainer do not fill machines of 8"),
    ],
)
def test_what_the_files_cannot_express_is_refused(written, capsys, flags, options, more, said):
    assert written(*flags, more=more, **options) == 2
    assert said in capsys.readouterr().err
    assert not Path("prime-rl").exists()
    Path("run.toml").write_text('[backend]\nbackend = "local"\n', encoding="utf-8")
    assert run(["prime-rl-config", "run.toml"]) == 2
    assert 'set backend = "prime_rl"' in capsys.readouterr().err


def test_edited_files_are_kept_unless_forced(written, capsys):
    assert written() == 0
    assert written() == 0  # nothing would change
    edited = Path("prime-rl/trainer.toml")
    edited.write_text(edited.read_text(encoding="utf-8") + "# mine\n", encoding="utf-8")
    kept = {name: Path("prime-rl", name).read_bytes() for name in FILES}
    capsys.readouterr()
    assert written(seq_len=7168, data_world_size=2) == 2
    assert "--force" in capsys.readouterr().err
    assert kept == {name: Path("prime-rl", name).read_bytes() for name in FILES}
    assert written("--force") == 0
    assert "# mine" not in edited.read_text(encoding="utf-8")
    assert sorted(path.name for path in Path("prime-rl").iterdir()) == sorted(FILES)


def test_one_machine_divides_its_gpus_and_several_share_the_trainer(written):
    url = "http://localhost:8000,http://127.0.0.1:8010"
    assert (
        written("--inference-gpus", "2", "--context-parallel", "2", url=url, pad_to_multiple_of=4, data_world_size=2)
        == 0
    )
    one, two, trainer, ours = typed("One machine")
    assert one.startswith("CUDA_VISIBLE_DEVICES=0,1 uv run inference @ /")
    assert one.endswith("/prime-rl/inference.toml")
    assert two.startswith("CUDA_VISIBLE_DEVICES=2,3 ")
    assert two.endswith(" --server.port 8010")
    assert trainer.startswith("CUDA_VISIBLE_DEVICES=4,5,6,7 ")
    assert " --nproc-per-node=4 " in trainer
    assert ours == "retrain run.toml"
    assert read("inference.toml")["server"]["host"] == "127.0.0.1"
    assert read("trainer.toml")["model"]["cp"] == 2
    assert written("--gpus-per-node", "4", "--max-steps", "9", "--force", data_world_size=12) == 0
    assert not typed("One machine")
    server, trainer, ours = typed("Several machines")
    assert server.endswith("# on gpu-1")
    assert "--nnodes=3 " in trainer
    assert "--nproc-per-node=4 " in trainer
    assert ours == "retrain run.toml --max-steps 9"  # the run that the files were written for


def test_hostile_names_stay_what_they_are(written):
    name = '/tmp/a b"\\\n\x7f$(touch x)/ü'
    assert written("--out", "my files", output_dir=name) == 0
    assert read("trainer.toml", "my files")["output_dir"] == name
    text = Path("my files/start.md").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if "torchrun" in line)
    assert shlex.split(line)[-1] == str(Path("my files/trainer.toml").resolve())
    assert written(more='[model]\nmodel = "builtin:tiny"\n') == 0
    assert (Path(read("trainer.toml")["model"]["name"]) / "config.json").is_file()
    assert read("inference.toml")["vllm"]["model"] == read("trainer.toml")["model"]["name"]
