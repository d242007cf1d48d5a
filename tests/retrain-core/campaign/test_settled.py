"""The devices of a campaign's runs: settled before anything runs or moves, written into `configs/`, and kept."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.campaign.load import load_campaign
from retrain.campaign.session import run_campaign
from retrain.kernel.errors import ConfigError, ResumeError
from retrain.kernel.plugins.discover import load_plugins

Play = Callable[..., list[str]]
ONE = '[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "toy_flat"\n'
TWO = ONE + ONE.replace("grpo", "toy_raw")
GPU, CPU, UNSET = 'devices = "gpu:0"', 'devices = "cpu"', ""
WHY = "not set, and there is no GPU"


@pytest.fixture
def on(play: Play) -> Play:
    """`on("gpu:0", conditions, ...)`: play a campaign on a machine with a CPU and these GPUs."""

    def call(gpus: str, conditions: str = ONE, *, seeds: str = "[1]", **options: Any) -> list[str]:
        Path("machine.txt").write_text(f"cpu {gpus}")
        return play(f"seeds = {seeds}", conditions, **options)

    return call


def written() -> dict[str, str | None]:
    """`[backend] devices` in each run's configuration file."""
    files = sorted(Path("out/configs").iterdir())
    return {file.stem: tomllib.loads(file.read_text())["backend"].get("devices") for file in files}


def manifest() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path("out/manifest.json").read_text())
    return content


@pytest.mark.parametrize(("gpus", "used", "why"), [("", "cpu", WHY), ("gpu:0", "gpu:0", "not set, and it is there")])
def test_what_is_there_is_said_and_written(
    on: Play, capsys: pytest.CaptureFixture[str], gpus: str, used: str, why: str
) -> None:
    on(gpus, devices=UNSET)
    assert written() == {"grpo+toy_flat_s1": used}
    assert manifest()["devices"] == {"grpo+toy_flat": {"used": used, "why": why}}
    lines = capsys.readouterr().out.splitlines()
    assert lines.count(f"  devices: {used} ({why})") == 2  # at the start and at the end


@pytest.mark.long
def test_what_somebody_set_is_an_error_before_anything_runs_or_moves(on: Play) -> None:
    on("", devices=CPU)
    for arguments, devices in (((), GPU), (("--devices", "gpu:0"), CPU)):
        with pytest.raises(ConfigError, match="no gpu:0"):
            on("", devices=devices, arguments=arguments, is_new=True)
    with pytest.raises(ConfigError, match="no gpu:0"):
        on("", ONE + GPU + "\n", devices=CPU, is_new=True)  # one that a condition sets
    assert not Path("out.1").exists()
    with pytest.raises(ConfigError, match="no gpu:0"):
        on("", devices=GPU, logs=True)
    assert not Path("logs").exists()


@pytest.mark.long
def test_its_own_config_toml_continues_it(on: Play) -> None:
    on("", devices=UNSET)
    plugins = load_plugins({})
    assert tomllib.loads(Path("out/config.toml").read_text())["backend"]["devices"] == "cpu"
    run_campaign(load_campaign(["--resume", "out"], plugins), plugins)  # as `retrain --resume out` does
    assert on("", devices=UNSET) == []


@pytest.mark.long
def test_it_keeps_its_devices_when_it_grows_on_another_machine(on: Play) -> None:
    on("", devices=UNSET)
    on("gpu:0", TWO, devices=UNSET, seeds="[1, 2]")
    assert set(written().values()) == {"cpu"}
    assert set(map(str, manifest()["devices"].values())) == {str({"used": "cpu", "why": WHY})}
    assert on("gpu:0", TWO, devices=CPU, seeds="[1, 2]") == []  # says what was used
    with pytest.raises(ResumeError, match=r"backend\.devices was 'cpu' and is now 'gpu:0'"):
        on("gpu:0", TWO, devices=GPU, seeds="[1, 2]")


def test_with_another_launcher_each_run_settles_its_own(on: Play) -> None:
    ray = ("--campaign-launcher", "ray")
    on("", devices=UNSET, arguments=ray)
    assert written() == {"grpo+toy_flat_s1": None}
    assert "devices" not in manifest()
    on("", devices=GPU, arguments=ray, is_new=True)  # the cluster may have it
    assert written() == {"grpo+toy_flat_s1": "gpu:0"}
