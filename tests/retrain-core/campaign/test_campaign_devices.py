"""GPUs dealt out to runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.campaign.load import Campaign, gpus_per_run
from retrain.campaign.planned import plan_runs
from retrain.campaign.processes import DevicePool
from retrain.kernel.errors import ConfigError


def test_each_run_gets_the_least_used() -> None:
    pool = DevicePool(["gpu:0", "gpu:1", "gpu:5"], {})
    first, second = pool.take(1), pool.take(1)
    assert (first, second, pool.take(2)) == (["0"], ["1"], ["0", "5"])
    pool.give_back(second)
    assert pool.take(1) == ["1"]


def test_what_the_campaign_itself_may_see_is_counted() -> None:
    pool = DevicePool(["gpu:0", "gpu:1"], {"CUDA_VISIBLE_DEVICES": "6,GPU-8f"})
    assert (pool.take(1), pool.take(1)) == (["6"], ["GPU-8f"])


def test_one_device_is_everybodys() -> None:
    assert DevicePool(["gpu:1"], {}).take(1) == DevicePool(["cpu"], {}).take(1) == []


def test_a_run_of_several_devices_gets_them_all(load_text: Callable[..., Campaign], tmp_path: Path) -> None:
    def given(devices: str, each: int) -> tuple[str | None, int]:
        options = ("--devices", devices, "--campaign-devices-per-run", str(each))
        campaign = load_text("seeds = [1]\nmax_steps = 4", arguments=options)
        return plan_runs(campaign, tmp_path)[0].devices, gpus_per_run(campaign.config, campaign.table)

    assert given("cpu,cpu", 2) == ("cpu,cpu", 0)
    assert given("gpu:4,gpu:5,gpu:6,gpu:7", 2) == ("gpu:0,gpu:1", 2)
    assert given("gpu:0", 1) == ("gpu:0", 1)
    with pytest.raises(ConfigError, match="only if all of them are GPUs"):
        given("cpu,cpu", 1)
