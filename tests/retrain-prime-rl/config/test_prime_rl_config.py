"""`retrain prime-rl-config`: its files say what the run says. That PRIME-RL takes them is shown by tests/prime_rl."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.api import load_plugins
from retrain.cli.command_line import run
from retrain.run.configure import load_checked

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
