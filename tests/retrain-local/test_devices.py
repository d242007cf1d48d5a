from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from retrain.api import ConfigError, PluginContext
from retrain_local.devices import choose_device

Make = Callable[..., PluginContext]


def test_cpu(make_context: Make) -> None:
    assert choose_device(make_context(devices="cpu").config) == torch.device("cpu")


def test_missing_gpu_falls_back_with_one_warning(
    make_context: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.INFO, logger="retrain"):
        assert choose_device(make_context(devices="gpu:0").config) == torch.device("cpu")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "gpu:0" in caplog.text


@pytest.mark.parametrize("devices", ["", "cuda:0", "gpu", "gpu:-1", "gpu:a", "CPU", "mps", "gpu:0;gpu:1"])
def test_not_a_device(make_context: Make, devices: str) -> None:
    with pytest.raises(ConfigError, match=r"\[backend\] devices"):
        choose_device(make_context(devices=devices).config)


@pytest.mark.parametrize("devices", ["gpu:0,gpu:1", "cpu,gpu:0", "gpu:0,"])
def test_split_mode_is_refused(make_context: Make, devices: str) -> None:
    with pytest.raises(ConfigError, match="split mode is not built yet"):
        choose_device(make_context(devices=devices).config)


def test_index_past_the_last_gpu(make_context: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device(make_context(devices="gpu:1").config) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="this machine has 2 GPUs"):
        choose_device(make_context(devices="gpu:2").config)
