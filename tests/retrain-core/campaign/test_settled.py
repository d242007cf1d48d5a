"""The devices of a campaign's runs: settled before anything runs or moves, written into `configs/`, and kept."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.campaign.load import load_campaign
from retrain.campaign.session import run_campaign
from retrain.kernel.errors import ConfigError, ResumeError
from retrain.kernel.plugins.discover import load_plugins
from tests.end_to_end.campaigns import manifest
from tests.kit.campaigns import conditions

Play = Callable[..., list[str]]
ONE = conditions("grpo+toy_flat")
TWO = ONE + conditions("toy_raw+toy_flat")
GPU, CPU, UNSET = 'devices = "gpu:0"', 'devices = "cpu"', ""
WHY = "not set, and there is no GPU"


@pytest.fixture
def on(play: Play) -> Play:
    """`on("gpu:0", conditions, ...)`: play a campaign on a machine with a CPU and these GPUs."""

    def call(gpus: str, conditions: str = ONE, *, seeds: str = "[1]", **options: object) -> list[str]:
        Path("machine.txt").write_text(f"cpu {gpus}")
        return play(f"seeds = {seeds}", conditions, **options)

    return call


def written() -> dict[str, str | None]:
    """`[backend] devices` in each run's configuration file."""
    files = sorted(Path("out/configs").iterdir())
    return {file.stem: tomllib.loads(file.read_text())["backend"].get("devices") for file in files}


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
def test_devices_that_are_set_and_missing_are_an_error_before_anything_runs_or_moves(on: Play) -> None:
    on("", devices=CPU)
    for arguments, given, devices in (((), ONE, GPU), (("--devices", "gpu:0"), ONE, CPU), ((), ONE + GPU + "\n", CPU)):
        with pytest.raises(ConfigError, match="no gpu:0"):
            on("", given, devices=devices, arguments=arguments, is_new=True)
    assert not Path("out.1").exists()
    with pytest.raises(ConfigError, match="no gpu:0"):
        on("", devices=GPU, logs=True)
    assert not Path("logs").exists()


@pytest.mark.long
def test_it_keeps_its_devices_when_it_grows_on_another_machine(on: Play) -> None:
    on("", devices=UNSET)
    plugins = load_plugins({})
    assert tomllib.loads(Path("out/config.toml").read_text())["backend"]["devices"] == "cpu"
    run_campaign(load_campaign(["--resume", "out"], plugins), plugins)  # as `retrain --resume out` does
    assert on("", devices=UNSET) == []
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
