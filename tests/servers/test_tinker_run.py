"""The whole command on SkyRL-tx: `builtin:tiny` learns although it is killed. `nox -s server-tinker`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.servers.skyrl import SkyRL, tiny_server

pytestmark = [pytest.mark.server, pytest.mark.timeout(3000)]
TOLERANCE = 1e-4  # nats, float32 on both sides
TRAINING = """
[model]
model = "builtin:tiny"
base_url = "{url}"
lora_rank = 16
[backend]
backend = "tinker"
[backend.options]
base_model = "{model}"
[sepa]
steps = 20
delay_steps = 3
[training]
seed = 1
max_steps = 24
batch_size = 4
group_size = 16
max_tokens = 48
temperature = 1.0
lr = 3e-3
save_every = 6
[data]
source = "arithmetic"
[eval]
every = 0
examples = 32
samples = 4
[logging]
log_dir = "run"
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environ = os.environ | {"TINKER_API_KEY": "tml-test"}
    with (folder / "out.log").open("a") as log:
        command = [sys.executable, "-m", "retrain", *arguments]
        return subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log, text=True)


def metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_tiny_model_learns_although_the_run_is_killed_on_the_way(tmp_path: Path) -> None:
    with tiny_server(tmp_path / "skyrl") as server:
        _learns(server, tmp_path)


def _learns(server: SkyRL, tmp_path: Path) -> None:
    (tmp_path / "retrain.toml").write_text(TRAINING.format(url=server.url, model=server.model))
    process = start(tmp_path)
    while not (lines := metrics(tmp_path)) or lines[-1]["step"] < 8:
        assert process.poll() is None, (tmp_path / "out.log").read_text()
        time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed = {line["step"]: line for line in metrics(tmp_path)}
    resumed = start(tmp_path, "--resume", "run")
    assert resumed.wait() == 0, (tmp_path / "out.log").read_text()
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(-1, 24))
    rates = [line["eval_correct_rate"] for line in lines if "eval_correct_rate" in line]
    assert rates[-1] >= rates[0] + 0.2, rates
    assert max(line["logprob_gap_max"] for line in lines if "logprob_gap_max" in line) < TOLERANCE
    for step in (6, 7):  # done twice: before the kill, and again from the checkpoint
        assert lines[step + 1]["loss"] == pytest.approx(killed[step]["loss"], abs=1e-4)
        assert lines[step + 1]["correct_rate"] == killed[step]["correct_rate"]
