"""PyTorch's libraries are loaded ahead of the import, and nothing else is different."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from retrain.api import load_plugins

WAIT = "import threading\nfor t in threading.enumerate():\n    t.name == 'preload-torch' and t.join()\n"
only_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has them loaded ahead")


def run(code: str, *arguments: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@only_linux
def test_the_libraries_are_there_before_the_import_and_the_import_finds_them() -> None:
    code = (
        "import sys\nfrom retrain_local.preload import preload_libraries\npreload_libraries()\n"
        + WAIT
        + "maps = open('/proc/self/maps').read()\n"
        "assert 'libtorch_cpu.so' in maps and 'torch' not in sys.modules\n"
        "import torch\n"
        "assert torch.ones(3).sum().item() == 3.0\n"
        "files = {line.split()[-1] for line in open('/proc/self/maps') if 'libtorch_cpu.so' in line}\n"
        "assert len(files) == 1, files\n"
    )
    run(code)


@only_linux
def test_a_library_that_cannot_be_loaded_is_left_to_the_import(tmp_path: Path) -> None:
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("here = True\n")
    (tmp_path / "torch" / "lib" / "libtorch.so").write_bytes(b"no library")
    code = (
        "import sys\nsys.path.insert(0, sys.argv[1])\n"
        "from retrain_local.preload import preload_libraries\npreload_libraries()\n"
        + WAIT
        + "import torch\nassert torch.here\n"
    )
    run(code, str(tmp_path))


def test_without_pytorch_nothing_happens() -> None:
    code = (
        "import importlib.util, threading\n"
        "importlib.util.find_spec = lambda name: None\n"
        "from retrain_local.preload import preload_libraries\npreload_libraries()\n"
        "assert threading.active_count() == 1\n"
    )
    run(code)


@only_linux
@pytest.mark.parametrize(("backend", "is_loaded"), [("local", True), ("tinker", False)])
def test_only_a_run_that_trains_here_asks_for_them(backend: str, is_loaded: bool) -> None:
    code = (
        "import sys\nfrom retrain.config.resolved import Config\nfrom retrain.config.schema import BackendTable\n"
        "from retrain.plugins.manager import load_plugins\n"
        "config = Config(tables={'backend': BackendTable(backend=sys.argv[1])})\n"
        "load_plugins({}).notify('retrain_warm_up', config=config)\n" + WAIT + "assert 'torch' not in sys.modules\n"
        "print('libtorch_cpu.so' in open('/proc/self/maps').read())\n"
    )
    assert run(code, backend) == f"{is_loaded}\n"


@only_linux
def test_a_process_that_ends_at_once_ends_well() -> None:
    code = "from retrain_local.preload import preload_libraries\npreload_libraries()\nraise SystemExit(0)\n"
    for _ in range(3):
        run(code)


def test_the_hook_is_found() -> None:
    hook = load_plugins({}).pluggy.hook.retrain_warm_up
    assert "retrain-local" in " ".join(impl.plugin_name for impl in hook.get_hookimpls())
