from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from retrain.api import ConfigError, PluginContext
from retrain_local.devices import Devices, choose_devices

Make = Callable[..., PluginContext]


CPU = torch.device("cpu")


def test_cpu(make_context: Make) -> None:
    assert choose_devices(make_context(devices="cpu").config) == Devices(samplers=(CPU,), trainer=CPU)


@pytest.mark.parametrize(("devices", "samplers"), [("cpu,cpu", 1), ("cpu, cpu , cpu", 2)])
def test_the_last_of_several_trains_and_the_others_sample(make_context: Make, devices: str, samplers: int) -> None:
    found = choose_devices(make_context(devices=devices).config)
    assert found == Devices(samplers=(CPU,) * samplers, trainer=CPU, is_split=True)


@pytest.mark.parametrize(("devices", "is_split"), [("gpu:0", False), ("gpu:0,gpu:1", True)])
def test_missing_gpus_fall_back_with_one_warning(
    make_context: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, devices: str, is_split: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.INFO, logger="retrain"):
        found = choose_devices(make_context(devices=devices).config)
    assert found == Devices(samplers=(CPU,), trainer=CPU, is_split=is_split)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "gpu:0" in caplog.text


@pytest.mark.parametrize(
    "devices", ["", "cuda:0", "gpu", "gpu:-1", "gpu:a", "CPU", "mps", "gpu:0;gpu:1", "gpu:0,", ","]
)
def test_not_a_device(make_context: Make, devices: str) -> None:
    with pytest.raises(ConfigError, match=r"\[backend\] devices"):
        choose_devices(make_context(devices=devices).config)


def test_a_cpu_beside_a_gpu_is_refused(make_context: Make) -> None:
    with pytest.raises(ConfigError, match="do not compute the same policy"):
        choose_devices(make_context(devices="cpu,gpu:0").config)


def test_gpus_by_index(make_context: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_devices(make_context(devices="gpu:1").config).trainer == torch.device("cuda", 1)
    split = choose_devices(make_context(devices="gpu:1,gpu:0").config)
    assert (split.samplers, split.trainer) == ((torch.device("cuda", 1),), torch.device("cuda", 0))
    for devices in ("gpu:2", "gpu:0,gpu:2"):
        with pytest.raises(ConfigError, match="there is no gpu:2: this machine has 2 GPUs"):
            choose_devices(make_context(devices=devices).config)
