"""The whole command on a service of the tests' own: it trains, is killed, goes on, and reads well."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.running import records, untimed
from tests.kit.tinker_server import serving
from tests.kit.tinker_toy import Toy

TOML = """
[model]
model = "builtin:tiny"
base_url = "{url}"
lora_rank = 2
[backend]
backend = "tinker"
[backend.options]
base_model = "toy/bigram"
timeout_s = {timeout_s}
[algorithm]
transform_mode = "none"
[training]
seed = 1
max_steps = 4
batch_size = 2
group_size = 4
max_tokens = 12
temperature = 1.0
lr = 0.05
save_every = 2
[data]
source = "files"
path = "tasks.jsonl"
[reward]
type = "custom"
custom_module = "first_letters"
custom_function = "score"
[logging]
log_dir = "run"
"""
REWARD = "def score(completion, reference):\n    return float(sum(map(ord, completion)) % 3 == 0)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret-of-mine")
    rows = [{"prompt": f"say {word}", "answer": word} for word in ("one", "two", "three", "four")]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "first_letters.py").write_text(REWARD)
    return tmp_path


def run(folder: Path, *arguments: str) -> Any:
    command = [
        sys.executable,
        "-m",
        "retrain",
        "--scoring-audit",
        "off",
        *arguments,
    ]  # not preloaded: without torch too
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lines(folder: Path) -> list[dict[str, Any]]:
    file = folder / "run" / "metrics.jsonl"
    return records(file) if file.exists() else []


def whole_run(folder: Path, *arguments: str) -> str:
    """The output of a run that succeeds, and keeps the key to itself."""
    process = run(folder, *arguments)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    for file in folder.rglob("*"):
        if file.is_file() and file.suffix != ".safetensors":
            assert "tml-secret-of-mine" not in file.read_text(errors="replace"), file
    return str(output)


def interrupted_at_2(folder: Path, interrupt: Callable[[Any], object]) -> tuple[int, str]:
    """The end of a run that is interrupted once the line of step 2 is there."""
    process = run(folder)
    while not lines(folder) or lines(folder)[-1]["step"] != 2:
        assert process.poll() is None
        time.sleep(0.02)
    interrupt(process)
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


def test_a_run_trains_reads_well_and_keeps_the_key_to_itself(folder: Path) -> None:
    with serving(Toy(vocabulary=512)) as url:
        (folder / "retrain.toml").write_text(TOML.format(url=url, timeout_s=60.0))
        output = whole_run(folder)
    assert "Connecting to Tinker..." in output
    assert "Creating LoRA training client (model=toy/bigram, rank=2)..." in output
    assert "Training client ready." in output
    assert "WARNING" not in output
    straight = lines(folder)
    assert [line["step"] for line in straight] == [0, 1, 2, 3]
    assert max(line.get("logprob_gap_max", 0.0) for line in straight) < 1e-5
    assert all("grad_norm" not in line for line in straight)


@pytest.mark.long
def test_a_warm_up_and_the_base_model_as_reference(folder: Path) -> None:
    """Two supervised steps, then two of RL whose rewards are less the divergence from the base model."""
    with serving(Toy(vocabulary=512)) as url:
        toml = TOML.format(url=url, timeout_s=60.0) + '[kl]\ncoef = 0.1\nwhere = "reward"\n[sft]\nsteps = 2\n'
        (folder / "retrain.toml").write_text(toml.replace("max_steps = 4", "max_steps = 2"))
        whole_run(folder)
    *supervised, first, second = lines(folder)
    assert [line["step"] for line in supervised] == [-3, -2]
    assert supervised[1]["sft_loss"] < supervised[0]["sft_loss"]
    for line in (first, second):
        assert line["kl_coef"] == 0.1
        assert 0.0 < line["kl_mean"] < 10.0  # the warm-up has moved the policy already
        assert line["kl_penalty_mean"] != 0.0


@pytest.mark.long
def test_a_run_that_is_killed_and_resumed_is_the_run_that_was_not(folder: Path) -> None:
    toy = Toy(vocabulary=512)
    with serving(toy) as url:
        (folder / "retrain.toml").write_text(TOML.format(url=url, timeout_s=60.0))
        whole_run(folder)
        (folder / "run").rename(folder / "first")
        toy.faults.latency_s = 0.2
        interrupted_at_2(folder, lambda process: process.kill())
        toy.faults.latency_s = 0.0
        whole_run(folder, "--resume", "run")
    assert untimed(folder / "run" / "metrics.jsonl") == untimed(folder / "first" / "metrics.jsonl")


@pytest.mark.long
def test_a_service_that_goes_away_ends_the_run_with_one_message_and_a_whole_checkpoint(folder: Path) -> None:
    toy, server = Toy(vocabulary=512), ExitStack()
    url = server.enter_context(serving(toy))
    (folder / "retrain.toml").write_text(TOML.format(url=url, timeout_s=3.0))
    code, output = interrupted_at_2(folder, lambda process: server.close())
    assert code == 1, output
    assert "Traceback" not in output
    assert "no answer within 3 s" in output
    with serving(toy, int(url.rpartition(":")[2])):
        whole_run(folder, "--resume", "run")
    assert [line["step"] for line in lines(folder)] == [0, 1, 2, 3]
