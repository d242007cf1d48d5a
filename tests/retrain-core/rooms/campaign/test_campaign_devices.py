"""GPUs dealt out to runs."""

from __future__ import annotations

from retrain.rooms.campaign.devices import DevicePool


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
