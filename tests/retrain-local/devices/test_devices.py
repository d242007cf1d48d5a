from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from retrain.api import ConfigError
from retrain.kernel.config.resolved import Layer, Origin
from retrain_local import plugin
from retrain_local.checks import device_problems
from retrain_local.devices.torch_devices import Devices, choose_devices, find_devices, missing_cuda
from tests.kit.local_backend import Local
from tests.kit.problems import codes_in

CPU = torch.device("cpu")


@pytest.mark.parametrize(("devices", "samplers"), [("cpu", 1), ("cpu,cpu", 1), ("cpu, cpu , cpu", 2)])
def test_the_last_of_several_trains_and_the_others_sample(local: Local, devices: str, samplers: int) -> None:
    found = choose_devices(local.context(devices=devices).config)
    assert found == Devices(samplers=(CPU,) * samplers, trainer=CPU, is_split="," in devices)


@pytest.mark.parametrize(("devices", "is_split"), [("gpu:0", False), ("gpu:0,gpu:1", True)])
def test_missing_gpus_that_nobody_set_fall_back_with_one_warning(
    local: Local, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, devices: str, is_split: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = local.context(devices=devices).config
    with caplog.at_level(logging.INFO, logger="retrain"):
        found = choose_devices(config)
    assert found == Devices(samplers=(CPU,), trainer=CPU, is_split=is_split)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "[backend] devices is not set, and PyTorch" in caplog.text
    used, why = find_devices(config)
    assert used == ",".join(["cpu"] * (1 + is_split))
    assert why in caplog.text


def test_only_gpus_are_looked_for(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = local.context(devices="gpu:0").config
    found = plugin.find_devices(config)
    assert found is not None
    assert found[0] == "cpu"
    backend = config.backend.model_copy(update={"devices": "cpu"})
    assert plugin.find_devices(replace(config, tables={**config.tables, "backend": backend})) is None


@pytest.mark.parametrize(
    ("origin", "where"),
    [
        (Origin(layer=Layer.FILE, place="retrain.toml:3"), "retrain.toml:3 [backend] devices"),
        (Origin(layer=Layer.ENVIRONMENT, place="RETRAIN__BACKEND__DEVICES"), "RETRAIN__BACKEND__DEVICES"),
        (Origin(layer=Layer.COMMAND_LINE, place="--devices"), "--devices"),
    ],
)
@pytest.mark.parametrize("devices", ["gpu:0", "gpu:0,gpu:1"])
def test_missing_gpus_that_somebody_set_are_an_error_with_the_fix(
    local: Local, monkeypatch: pytest.MonkeyPatch, devices: str, origin: Origin, where: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = replace(local.context(devices=devices).config, origins={"backend.devices": origin})
    for choose in (choose_devices, find_devices):
        with pytest.raises(ConfigError) as caught:
            choose(config)
        assert codes_in(caught) == ["device.no-gpu"]
        assert caught.value.problems[0].where.startswith(where)


def test_the_reason_names_the_build_the_driver_or_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(message: str) -> Callable[[], None]:
        def init() -> None:
            raise RuntimeError(message)

        return init

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", None)
    why, fix = missing_cuda()
    assert why == f"PyTorch {torch.__version__} is built without CUDA"
    assert "install a build with CUDA" in fix
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "init", fails("Found no NVIDIA driver on your system.\nPlease check"))
    why, fix = missing_cuda()
    assert why.endswith("finds no usable GPU: Found no NVIDIA driver on your system.")
    assert "nvidia-smi" in fix
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert missing_cuda()[1] == "unset CUDA_VISIBLE_DEVICES"


def test_a_gpu_that_is_there_by_default_is_named(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Card {device.index}")
    config = local.context(devices="gpu:0").config
    used, why = find_devices(config)
    assert used == "gpu:0"
    assert why == f"[backend] devices is not set, and PyTorch {torch.__version__} sees Card 0"
    asked = Origin(layer=Layer.COMMAND_LINE, place="--devices")
    assert find_devices(replace(config, origins={"backend.devices": asked})) == ("gpu:0", "")


@pytest.mark.parametrize(
    ("devices", "code", "fix"),
    [
        *((name, "unknown-name", "") for name in ("", "gpu", "gpu:-1", "gpu:a", "CPU", "gpu:0;gpu:1", "gpu:0,", ",")),
        ("cuda", "unknown-name", '"gpu:0" for a CUDA GPU'),
        ("cuda:3", "unknown-name", '"gpu:3" for a CUDA GPU'),
        ("mps", "unknown-name", 'write "cpu"'),
        ("tpu", "unknown-name", '"cpu"'),
        *((names, "mixed-kinds", "") for names in ("cpu,gpu:0", "gpu:0, cpu")),
    ],
)
def test_other_names_are_refused_with_a_name_that_is_a_device(local: Local, devices: str, code: str, fix: str) -> None:
    config = local.context(devices=devices).config
    (problem,) = device_problems(config)
    assert (problem.code, problem.where) == (f"device.{code}", "[backend] devices (default)")
    assert fix in problem.fix
    with pytest.raises(ConfigError) as caught:
        choose_devices(config)
    assert caught.value.problems == (problem,), "the check before anything loads says the same"


def test_gpus_by_index(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_devices(local.context(devices="gpu:1").config).trainer == torch.device("cuda", 1)
    split = choose_devices(local.context(devices="gpu:1,gpu:0").config)
    assert (split.samplers, split.trainer) == ((torch.device("cuda", 1),), torch.device("cuda", 0))
    for devices in ("gpu:2", "gpu:0,gpu:2"):
        with pytest.raises(ConfigError) as caught:
            choose_devices(local.context(devices=devices).config)
        assert codes_in(caught) == ["device.no-such-gpu"]
