"""What this distribution tells the doctor, on machines that are made to look different."""

from __future__ import annotations

import builtins
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from retrain.api import Diagnosis, PluginContext
from retrain.kernel.config import schema
from retrain_local.doctor import diagnose
from tests.kit.local_backend import Local


def found(context: PluginContext) -> dict[str, Diagnosis]:
    return {finding.name: finding for finding in diagnose(context.config, context.plugins)}


def test_a_cpu_run_has_what_it_needs(local: Local) -> None:
    findings = found(local.context(devices="cpu"))
    needed = {name: finding.status for name, finding in findings.items() if finding.needed}
    assert needed == {"torch": "ok", "device": "ok", "weights": "ok"}
    assert findings["torch"].detail == torch.__version__


def test_a_missing_gpu_is_a_drawback_and_no_more(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device = found(local.context(devices="gpu:0"))["device"]
    assert (device.status, device.is_fatal) == ("warn", False)
    assert "it trains on the CPU" in device.detail


@pytest.mark.parametrize("devices", ["gpu:a", "cuda:0", "cpu,gpu:1", ""])
def test_no_device_at_all(local: Local, monkeypatch: pytest.MonkeyPatch, devices: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
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


def test_other_backends_are_not_told_about_torch(local: Local) -> None:
    config = local.context().config
    other = replace(config, tables={**config.tables, "backend": schema.BackendTable(backend="tinker")})
    assert diagnose(other, local.context().plugins) == []
