"""The whole command on a service of the tests' own: it trains, is killed, goes on, and reads well."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
def folder(tmp_path: Path) -> Path:
    rows = [{"prompt": f"say {word}", "answer": word} for word in ("one", "two", "three", "four")]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "first_letters.py").write_text(REWARD)
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "retrain", "--scoring-audit", "off", *arguments],
        cwd=folder,
        env=os.environ | {"TINKER_API_KEY": "tml-secret-of-mine"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def lines(folder: Path) -> list[dict[str, object]]:
    text = (folder / "run" / "metrics.jsonl").read_text() if (folder / "run" / "metrics.jsonl").exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def check_trains_and_reads_well(folder: Path, url: str) -> list[dict[str, object]]:
    """A whole run, and what it says; the lines of its metrics."""
    (folder / "retrain.toml").write_text(TOML.format(url=url, timeout_s=60.0))
    whole = run(folder)
    output, _ = whole.communicate(timeout=200)
    assert whole.returncode == 0, output
    assert "Connecting to Tinker..." in output
    assert "Creating LoRA training client (model=toy/bigram, rank=2)..." in output
    assert "Training client ready." in output
    assert "WARNING" not in output
    straight = lines(folder)
    assert [line["step"] for line in straight] == [0, 1, 2, 3]
    assert max(float(line.get("logprob_gap_max", 0.0)) for line in straight) < 1e-5  # type: ignore[arg-type]
    assert all("grad_norm" not in line for line in straight)
    return straight


def check_holds_no_key(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file() and file.suffix != ".safetensors":
            assert "tml-secret-of-mine" not in file.read_text(errors="replace"), file


def test_a_run_trains_and_keeps_the_key_to_itself(folder: Path) -> None:
    with serving(Toy(vocabulary=512)) as url:
        check_trains_and_reads_well(folder, url)
    check_holds_no_key(folder)


@pytest.mark.long
def test_a_warm_up_and_the_base_model_as_reference(folder: Path) -> None:
    """Two supervised steps, then two of RL whose rewards are less the divergence from the base model."""
    with serving(Toy(vocabulary=512)) as url:
        toml = TOML.format(url=url, timeout_s=60.0) + '[kl]\ncoef = 0.1\nwhere = "reward"\n[sft]\nsteps = 2\n'
        (folder / "retrain.toml").write_text(toml.replace("max_steps = 4", "max_steps = 2"))
        whole = run(folder)
        output, _ = whole.communicate(timeout=200)
    assert whole.returncode == 0, output
    *supervised, first, second = lines(folder)
    assert [line["step"] for line in supervised] == [-3, -2]
    losses = [float(str(line["sft_loss"])) for line in supervised]
    assert losses[1] < losses[0]
    assert first["kl_coef"] == second["kl_coef"] == 0.1
    for line in (first, second):
        assert 0.0 < float(str(line["kl_mean"])) < 10.0  # the warm-up has moved the policy already
        assert float(str(line["kl_penalty_mean"])) != 0.0


@pytest.mark.long
def test_a_run_that_is_killed_and_resumed_is_the_run_that_was_not(folder: Path, tmp_path: Path) -> None:
    toy = Toy(vocabulary=512)
    with serving(toy) as url:
        straight = check_trains_and_reads_well(folder, url)
        (folder / "run").rename(folder / "first")
        toy.faults.latency_s = 0.2
        killed = run(folder)
        while not lines(folder) or lines(folder)[-1]["step"] != 2:
            assert killed.poll() is None
            time.sleep(0.05)
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        toy.faults.latency_s = 0.0
        resumed = run(folder, "--resume", "run")
        output, _ = resumed.communicate(timeout=200)
        assert resumed.returncode == 0, output
        for one, other in zip(straight, lines(folder), strict=True):
            assert {k: v for k, v in one.items() if not k.endswith("_s")} == {
                k: v for k, v in other.items() if not k.endswith("_s")
            }
    check_holds_no_key(folder)


@pytest.mark.long
def test_a_service_that_goes_away_ends_the_run_with_one_message_and_a_whole_checkpoint(folder: Path) -> None:
    toy = Toy(vocabulary=512)
    with serving(toy) as url:
        (folder / "retrain.toml").write_text(TOML.format(url=url, timeout_s=3.0))
        port = int(url.rpartition(":")[2])
        first = run(folder)
        while not lines(folder) or lines(folder)[-1]["step"] != 2:
            assert first.poll() is None
            time.sleep(0.02)
    output, _ = first.communicate(timeout=200)
    assert first.returncode == 1, output
    assert "Traceback" not in output
    assert "no answer within 3 s" in output
    with serving(toy, port):
        resumed = run(folder, "--resume", "run")
        output, _ = resumed.communicate(timeout=200)
    assert resumed.returncode == 0, output
    assert [line["step"] for line in lines(folder)] == [0, 1, 2, 3]
