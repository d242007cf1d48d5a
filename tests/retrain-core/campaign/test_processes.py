"""Launcher `subprocess`: real processes."""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from retrain.api import Job
from retrain.campaign.processes import DevicePool, ProcessLauncher
from retrain.kernel.errors import BackendError
from tests.kit.problems import codes_in

ENVIRON = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ['OMP_NUM_THREADS'], os.environ['X'])"
PARENT = """
import sys, time
from pathlib import Path
from retrain.campaign.processes import DevicePool
from retrain.campaign.processes import ProcessLauncher
from retrain.campaign.launching import Job
job = Job(name="a", argv=(sys.executable, "-c", sys.argv[1]), environ={}, cwd=Path(), folder=Path())
print(ProcessLauncher(DevicePool([])).start(job).pid, flush=True)
time.sleep(600)
"""
SLEEPS = "import time; print('up', flush=True); time.sleep(600)"


@pytest.fixture
def job(tmp_path):
    """`job("print(1)", num_gpus=1)`: a Python program as a job."""

    def make(program, **more):
        argv = (sys.executable, "-c", program)
        return Job(name="a", argv=argv, environ={"X": "1"}, cwd=tmp_path, folder=tmp_path, **more)

    return make


def ended(process):
    while (code := process.poll()) is None:
        time.sleep(0.01)
    return code


def wait_for_text(file, text="up"):
    while not file.exists() or text not in file.read_text():
        time.sleep(0.01)


def test_output_code_environment_and_devices(job, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    launcher = ProcessLauncher(DevicePool(["gpu:0", "gpu:1"], {}))
    first = launcher.start(job(SLEEPS, num_gpus=1))
    second = launcher.start(job(f"{ENVIRON}; raise SystemExit(3)", num_gpus=1, num_cpus=2))
    assert ended(second) == 3
    assert "1 2 1" in (tmp_path / "stdout.log").read_text()
    first.kill()
    assert ended(first) == -signal.SIGKILL
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # the user's own choice
    assert ended(launcher.start(job(ENVIRON, num_gpus=1))) == 0
    assert (tmp_path / "stdout.log").read_text().splitlines()[-1] == "0 7 1"  # both are free again; appended


def test_runs_get_the_least_used_devices_and_give_them_back(job):
    pool = DevicePool(["gpu:0", "gpu:1"], {})
    with pytest.raises(BackendError, match="a cannot be started: No such file") as caught:
        ProcessLauncher(pool).start(replace(job("1"), cwd=Path("/nowhere"), num_gpus=1))
    assert codes_in(caught) == ["campaign.cannot-start"]
    assert pool.take(1) == ["0"]
    pool = DevicePool(["gpu:0", "gpu:1", "gpu:5"], {})
    first, second = pool.take(1), pool.take(1)
    assert (first, second, pool.take(2)) == (["0"], ["1"], ["0", "5"])
    pool.give_back(second)
    assert pool.take(1) == ["1"]
    pool = DevicePool(["gpu:0", "gpu:1"], {"CUDA_VISIBLE_DEVICES": "6,GPU-8f"})
    assert (pool.take(1), pool.take(1)) == (["6"], ["GPU-8f"])
    assert DevicePool(["gpu:1"], {}).take(1) == DevicePool(["cpu"], {}).take(1) == []  # one device is shared by all


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_a_run_is_asked_to_stop_when_its_runner_is_killed(tmp_path):
    program = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit('asked'))\n"
    program += "print('up', flush=True)\ntime.sleep(600)"
    runner = subprocess.Popen(
        [sys.executable, "-c", PARENT, program], cwd=tmp_path, stdout=subprocess.PIPE, start_new_session=True
    )
    wait_for_text(tmp_path / "stdout.log")
    runner.kill()
    runner.communicate()
    wait_for_text(tmp_path / "stderr.log", "asked")
