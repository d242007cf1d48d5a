from __future__ import annotations

import builtins
import logging
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from retrain.api import ConfigError, Diagnosis, PluginContext
from retrain.kernel.config import schema
from retrain.kernel.config.resolved import Layer, Origin
from retrain_local import plugin
from retrain_local.checks import device_problems
from retrain_local.devices.torch_devices import (
    ONE_THREAD_BELOW,
    Devices,
    choose_devices,
    find_devices,
    limited_threads,
    missing_cuda,
    pack_workers,
    packs_at_a_time,
    threads_for,
    training_threads,
)
from retrain_local.doctor import diagnose
from tests.kit.local_backend import Local
from tests.kit.problems import codes_in, refused

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


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
    assert plugin.find_devices(config) == (used, why)
    assert plugin.find_devices(local.context(devices="cpu").config) is None, "only GPUs are looked for"


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
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", None)
    why, fix = missing_cuda()
    assert why == f"PyTorch {torch.__version__} is built without CUDA"
    assert "install a build with CUDA" in fix
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(
        torch.cuda, "init", Mock(side_effect=RuntimeError("Found no NVIDIA driver on your system.\nPlease"))
    )
    why, fix = missing_cuda()
    assert why.endswith("finds no usable GPU: Found no NVIDIA driver on your system.")
    assert "nvidia-smi" in fix
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert missing_cuda()[1] == "unset CUDA_VISIBLE_DEVICES"


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


def test_gpus_that_are_there_are_named_and_chosen_by_index(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Card {device.index}")
    config = local.context(devices="gpu:0").config
    assert find_devices(config) == (
        "gpu:0",
        f"[backend] devices is not set, and PyTorch {torch.__version__} sees Card 0",
    )
    asked = Origin(layer=Layer.COMMAND_LINE, place="--devices")
    assert find_devices(replace(config, origins={"backend.devices": asked})) == ("gpu:0", "")
    assert choose_devices(local.context(devices="gpu:1").config).trainer == torch.device("cuda", 1)
    split = choose_devices(local.context(devices="gpu:1,gpu:0").config)
    assert (split.samplers, split.trainer) == ((torch.device("cuda", 1),), torch.device("cuda", 0))
    for devices in ("gpu:2", "gpu:0,gpu:2"):
        assert refused(choose_devices, local.context(devices=devices).config) == ["device.no-such-gpu"]


def test_only_small_models_on_the_cpu_get_one_thread_and_the_process_gets_its_number_back() -> None:
    with limited_threads(3):
        assert [threads_for(size, CPU) for size in (ONE_THREAD_BELOW - 1, ONE_THREAD_BELOW)] == [1, 3]
        assert threads_for(1, GPU) == 3
        with suppress(KeyError), limited_threads(1):
            assert torch.get_num_threads() == 1
            raise KeyError
        assert torch.get_num_threads() == 3


def test_a_small_models_numbers_do_not_depend_on_the_number_of_cores(local: Local) -> None:
    reports = []
    for threads in (1, 2):
        with limited_threads(threads):
            backend = local.make()
            reports.append([])
            for step in range(2):
                reports[-1].append(backend.train(local.roll(backend, step=step)))
                backend.publish()
            assert torch.get_num_threads() == threads
    assert reports[0] == reports[1]


def test_every_core_computes_a_pack_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = ONE_THREAD_BELOW - 1, ONE_THREAD_BELOW
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    with limited_threads(8):
        assert (pack_workers(small, CPU), training_threads(1, small, CPU)) == (2, 1)
        assert (pack_workers(large, CPU), training_threads(8, large, CPU)) == (8, 1)
        assert (pack_workers(1, GPU), training_threads(8, 1, GPU)) == (1, 8)
    with limited_threads(24):
        assert (pack_workers(large, CPU), training_threads(24, large, CPU)) == (8, 3)
    with limited_threads(1):  # as OMP_NUM_THREADS=1 does
        assert (pack_workers(large, CPU), training_threads(1, large, CPU)) == (1, 1)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert pack_workers(1, CPU) == 1
    assert packs_at_a_time(1, CPU) == 2  # what rounding depends on does not depend on the cores


def found(context: PluginContext) -> dict[str, Diagnosis]:
    return {finding.name: finding for finding in diagnose(context.config, context.plugins)}


def test_a_cpu_run_has_what_it_needs(local: Local) -> None:
    findings = found(local.context(devices="cpu"))
    needed = {name: finding.status for name, finding in findings.items() if finding.needed}
    assert needed == {"torch": "ok", "device": "ok", "weights": "ok"}
    assert findings["torch"].detail == torch.__version__
    config = local.context().config
    other = replace(config, tables={**config.tables, "backend": schema.BackendTable(backend="tinker")})
    assert diagnose(other, local.context().plugins) == [], "other backends do not need torch"


def test_a_missing_gpu_is_a_drawback_and_no_device_is_fatal(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device = found(local.context(devices="gpu:0"))["device"]
    assert (device.status, device.is_fatal) == ("warn", False)
    assert "it trains on the CPU" in device.detail
    for devices in ("gpu:a", "cuda:0", "cpu,gpu:1", ""):
        assert found(local.context(devices=devices))["device"].is_fatal


def test_gpus_are_listed_with_their_memory(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Card {index}")

    def memory(index: int) -> tuple[int, int]:
        if index:
            raise RuntimeError("CUDA error: out of memory\nmore")
        return 30 * 2**30, 80 * 2**30

    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    findings = found(local.context(devices="cpu"))
    assert findings["gpu:0"].detail == "Card 0, 30.0 of 80.0 GiB free"
    assert (findings["gpu:1"].status, findings["gpu:1"].is_fatal) == ("failed", False)


def test_torch_that_cannot_be_imported(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    context = local.context(devices="cpu")
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **more: Any) -> Any:
        if name == "torch":
            raise OSError("libcudart.so.12: cannot open shared object file")
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.delitem(sys.modules, "torch")
    (finding,) = diagnose(context.config, context.plugins)
    assert finding.is_fatal
    assert "libcudart.so.12" in finding.detail
