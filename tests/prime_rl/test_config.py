"""PRIME-RL's configuration models take the files of `retrain prime-rl-config`, as its own commands would read them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.running import retrain
from tests.prime_rl.checkout import NEEDS_CHECKOUT, SOURCES, load

pytestmark = [pytest.mark.server, NEEDS_CHECKOUT]
RUN = """
[backend]
backend = "prime_rl"
[backend.options]
output_dir = "/shared/out"
seq_len = 8192
pad_to_multiple_of = 2
data_world_size = 16
transport = "{transport}"
[inference]
engine = "vllm"
url = "http://gpu-1:8000,http://gpu-2:8001"
[training]
max_tokens = 6144
keep_last = 3
"""
# In a process of its own, because nothing is stubbed there: these models need pydantic alone.
PARSE = """
import json, sys
from importlib import import_module
from pydantic_config import cli
name, arguments = json.loads(sys.argv[1])
read = cli(getattr(import_module(f"prime_rl.configs.{name.lower()}"), f"{name}Config"), args=arguments)
if name == "Inference":
    rest = read.model_dump(mode="json", include={"router", "backend_port"})
    print(json.dumps(vars(read.to_namespace()) | rest, default=str))
else:
    print(read.model_dump_json())
"""


def parsed(name: str, line: str) -> dict[str, Any]:
    """A line of start.md as the process that it starts reads it: the words from `@` on."""
    words = shlex.split(line, comments=True)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(str(load() / source) for source in SOURCES)}
    request = json.dumps([name, words[words.index("@") :]])
    done = subprocess.run([sys.executable, "-c", PARSE, request], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., list[str]]:
    """The lines that start servers, trainer and run on several machines."""

    def write(*flags: str, transport: str = "filesystem") -> list[str]:
        (tmp_path / "run.toml").write_text(RUN.format(transport=transport), encoding="utf-8")
        outcome = retrain("prime-rl-config", "run.toml", "--context-parallel", "2", *flags, cwd=tmp_path)
        assert outcome.code == 0, outcome.err
        return outcome.out.split("## Several machines")[1].split("```bash\n")[1].split("\n```")[0].splitlines()

    return write


def test_adapters_over_files(lines):
    first, second, trainer, _ = lines()
    server = parsed("Inference", first)
    assert (server["port"], server["router"], server["logprobs_mode"]) == (8000, None, "processed_logprobs")
    assert (server["enable_lora"], server["max_lora_rank"], server["max_model_len"]) == (True, 32, 8192)
    assert parsed("Inference", second)["port"] == 8001
    read = parsed("Trainer", trainer)
    assert (read["output_dir"], read["max_steps"]) == ("/shared/out", None)
    assert (read["model"]["seq_len"], read["model"]["cp"]) == (8192, 2)
    assert (read["model"]["lora"]["rank"], read["model"]["lora"]["alpha"]) == (32, 64)
    rates = {name: read["optim"][name] for name in ("lr", "weight_decay", "betas1", "betas2", "max_norm")}
    assert rates == {"lr": 4e-5, "weight_decay": 0.0, "betas1": 0.9, "betas2": 0.95, "max_norm": None}
    assert read["rollout_transport"]["type"] == read["weight_broadcast"]["type"] == "filesystem"
    assert (read["ckpt"]["interval"], read["ckpt"]["keep_last"], read["scheduler"]["type"]) == (20, 3, "constant")


def test_its_own_router_stands_before_the_engine_that_takes_weights(lines):
    both = ("--inference-url", "http://gpu-1:8000", "--inference-admin-url", "http://gpu-1:8200")
    server = parsed("Inference", lines(*both)[0])
    assert (server["port"], server["backend_port"], server["router"]["type"]) == (8000, 8200, "vllm-router")


def test_all_weights_over_sockets(lines):
    first, _, trainer, _ = lines("--all-weights", transport="zmq")
    assert not parsed("Inference", first)["enable_lora"]
    read = parsed("Trainer", trainer)
    assert read["model"]["lora"] is None
    assert read["optim"]["lr"] == 1e-6  # its default
    assert read["rollout_transport"] == {"type": "zmq", "host": "RUN", "port": 5555, "hwm": 10}
    assert read["weight_broadcast"]["type"] == "filesystem"


def test_the_trainer_is_put_back_to_a_checkpoint(lines):
    trainer = lines()[2]
    if "resume" in parsed("Trainer", trainer):  # since v0.8.1.dev26
        assert parsed("Trainer", f"{trainer} --resume.step 40")["resume"]["step"] == 40
        assert parsed("Trainer", f"{trainer} --resume")["resume"]["step"] is None  # the newest
    else:
        assert parsed("Trainer", f"{trainer} --ckpt.resume-step 40")["ckpt"]["resume_step"] == 40


def test_the_defaults_that_its_comments_name_are_its_own(lines, tmp_path):
    trainer = lines("--all-weights")[2]
    read = parsed("Trainer", trainer)
    text = (tmp_path / "prime-rl" / "trainer.toml").read_text(encoding="utf-8")
    assert '# attn = "auto", impl = "auto", optimization_dtype = "float32"' in text
    assert {name: read["model"][name] for name in ("attn", "impl")} == {"attn": "auto", "impl": "auto"}
    assert read["model"]["optimization_dtype"] == "float32"
    assert read["loss"]["type"] == "default"


def test_its_own_trainer_trains_with_them(trainer, server, tmp_path):
    made = trainer(ranks=1)
    debug = ("[log]", 'level = "debug"')  # how the test learns that it is ready
    made.write_toml(server)
    assert retrain("prime-rl-config", "retrain.toml", cwd=tmp_path).code == 0
    made.toml = (tmp_path / "prime-rl" / "trainer.toml").read_text(encoding="utf-8")
    made.start_trainer(*debug)
    outcome = retrain(cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert [line["step"] for line in made.trained()] == [1, 2, 3]
    assert max(line["mismatch_kl/all/max"] for line in made.trained()) < 1e-6
