"""`retrain doctor` on a machine with a GPU: it says whether Triton's kernels run, and what they lack."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from retrain.api import Diagnosis, load_plugins
from retrain_local.devices import kernel_trials
from retrain_local.doctor import diagnose
from tests.kit.fake_gpu.gpu import FakeGpu

pytestmark = pytest.mark.fake_gpu


def of_triton() -> Diagnosis:
    with FakeGpu().in_place():
        (found,) = (each for each in diagnose(None, load_plugins()) if each.name == "triton")
    return found


def test_a_kernel_is_launched() -> None:
    assert of_triton().status == "ok"


@pytest.mark.parametrize(
    ("error", "compiler", "fix"),
    [
        (RuntimeError("Failed to find C compiler"), None, "apt install gcc"),
        (subprocess.CalledProcessError(1, "gcc"), "gcc", "apt install python3-dev"),
        (ModuleNotFoundError("No module named 'triton'"), "gcc", "pip install triton"),
    ],
)
def test_a_kernel_that_does_not_run_is_reported_with_its_fix(
    monkeypatch: pytest.MonkeyPatch, error: Exception, compiler: str | None, fix: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(kernel_trials, "numbers", fail)
    monkeypatch.setattr(shutil, "which", lambda name: compiler if name == compiler else None)
    found = of_triton()
    assert found.status == "warn"
    assert str(error) in found.detail
    assert fix in found.fix
