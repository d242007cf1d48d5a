"""The real server of MLX-LM around `builtin:tiny`, as a subprocess.

It needs `mlx[cpu]` and `mlx-lm`: in the tests' own environment, or in that of the Python named by
RETRAIN_TEST_MLX_PYTHON. The server computes in the type that the weights are stored in; `float32_copy` makes it exact.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit import server_process

START_S = 120.0
NAMED = os.environ.get("RETRAIN_TEST_MLX_PYTHON", "")  # now: tests of the kernel hide such variables from it


def python() -> str:
    """The Python that has MLX-LM; skips the test where there is none."""
    if NAMED:
        return NAMED
    if importlib.util.find_spec("mlx_lm") is None or importlib.util.find_spec("mlx") is None:
        pytest.skip("mlx[cpu] and mlx-lm are not installed, and RETRAIN_TEST_MLX_PYTHON names no Python that has them")
    return sys.executable


def float32_copy(model: Path, folder: Path) -> Path:
    """The model with its weights stored as float32, which is how the trainer computes on a CPU."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    tensors = {name: tensor.float() for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@contextmanager
def mlx_serving(model: Path, home: Path, *arguments: str) -> Iterator[str]:
    """The URL of a server that runs for the duration of the block, with a hub cache that does not exist."""
    process, url = start(model, home, *arguments)
    try:
        yield url
    finally:
        server_process.end(process)


def start(model: Path, home: Path, *arguments: str, port: int = 0) -> tuple[subprocess.Popen[bytes], str]:
    """Start one; returns when it is healthy."""
    port, log = port or server_process.free_port(), home / "mlx-server.log"
    environ = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "HF_HOME": str(home / "no-hub-cache"),
        "HF_HUB_OFFLINE": "1",
        "MLX_DISABLE_COMPILE": "1",  # it would call a C++ compiler
        "OMP_NUM_THREADS": "1",
    }
    command = [python(), "-m", "mlx_lm", "server", "--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    process = server_process.launch([*command, *arguments], log, environ)
    server_process.wait_for(f"http://127.0.0.1:{port}/health", process, log, START_S)
    return process, f"http://127.0.0.1:{port}"
