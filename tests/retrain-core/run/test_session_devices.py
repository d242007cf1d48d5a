"""The devices that a run uses: settled before anything is loaded, recorded, and kept when it is resumed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
LOADED = """
from pathlib import Path
from retrain.api import hookimpl

@hookimpl
def retrain_tasks_loaded(): Path("loaded").touch()
"""


@pytest.fixture
def run(
    command: Callable[..., Any], toy_arguments: list[str], distribution: Callable[..., Path], tmp_path: Path
) -> Run:
    """`run("--devices", "cpu", gpus="gpu:0")`: a run of the toys to its end, or of `--resume`."""
    distribution("retrain-machine", {"machine": LOADED})
    base = [*toy_arguments, "--max-steps", "2", "--log-dir", "a"]

    def call(*arguments: str, gpus: str = "") -> Any:
        (tmp_path / "machine.txt").write_text(f"cpu {gpus}")
        (tmp_path / "loaded").unlink(missing_ok=True)
        return command(*([] if "--resume" in arguments else base), *arguments)

    return call


def recorded(folder: str = "a") -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(folder, "run.json").read_text())
    return content


def written(folder: str = "a") -> str:
    return str(tomllib.loads(Path(folder, "config.toml").read_text())["backend"]["devices"])


@pytest.mark.parametrize(
    ("gpus", "used", "why"),
    [("", "cpu", "there is no GPU"), pytest.param("gpu:0", "gpu:0", "it is there", marks=pytest.mark.slow)],
)
def test_the_default_takes_what_is_there_and_says_so(run: Run, gpus: str, used: str, why: str) -> None:
    outcome = run(gpus=gpus)
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[0] == f"Devices: {used} (not set, and {why})"
    assert lines[lines.index("Next:") - 1] == f"Trained on {used}: not set, and {why}"
    assert recorded()["devices"] == {"used": used, "why": f"not set, and {why}"}
    assert (recorded()["config"]["backend"]["devices"], written()) == (used, used)
    assert "backend.devices" not in recorded()["origins"]


def test_what_somebody_set_is_an_error_before_data_and_model(run: Run, tmp_path: Path) -> None:
    outcome = run("--devices", "gpu:0")
    assert outcome.code == 2
    assert "--devices [backend] devices: no gpu:0" in outcome.err
    assert not (tmp_path / "loaded").exists()
    assert not Path("a").exists()
    outcome = run("--devices", "gpu:0", gpus="gpu:0")
    assert (outcome.code, recorded()["devices"]) == (0, {"used": "gpu:0", "why": ""})
    assert "Trained on" not in outcome.out


@pytest.mark.slow
def test_a_resumed_run_keeps_its_devices(run: Run) -> None:
    more = ("--max-steps", "3")
    assert run().code == 0
    outcome = run("--resume", "a", *more, gpus="gpu:0")  # a GPU has come since
    assert outcome.code == 0, outcome.err
    assert recorded()["devices"] == {"used": "cpu", "why": "not set, and there is no GPU"}
    without = Path("a/config.toml").read_text().replace('devices = "cpu"\n', "")
    Path("my.toml").write_text(without)
    outcome = run("my.toml", "--resume", "a", "--max-steps", "4", gpus="gpu:0")
    assert (outcome.code, written()) == (0, "cpu"), outcome.err
    outcome = run("--resume", "a", "--devices", "gpu:0", "--max-steps", "5", gpus="gpu:0")
    assert outcome.code == 2
    assert "backend.devices was 'cpu' and is now 'gpu:0'" in outcome.err


@pytest.mark.slow
def test_a_gpu_run_is_not_continued_on_a_cpu_by_accident(run: Run) -> None:
    assert run(gpus="gpu:0").code == 0
    outcome = run("--resume", "a", "--max-steps", "3")
    assert outcome.code == 2
    assert "no gpu:0" in outcome.err
    assert run("--resume", "a", "--max-steps", "3", "--devices", "cpu").code == 2  # another run, unless they insist
    assert run("--resume", "a", "--max-steps", "3", "--devices", "cpu", "--resume-anyway", "true").code == 0
    assert (written(), recorded()["devices"]["used"]) == ("cpu", "cpu")
