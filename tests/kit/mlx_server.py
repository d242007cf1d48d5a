"""The real server of MLX-LM around `builtin:tiny`, as a subprocess.

It needs `mlx[cpu]` and `mlx-lm`: in the tests' own environment, or in that of the Python named by
RETRAIN_TEST_MLX_PYTHON. The server computes in the type that the weights are stored in; `float32_copy` makes it exact.
"""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

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
        process.kill()
        process.wait()


def start(model: Path, home: Path, *arguments: str, port: int = 0) -> tuple[subprocess.Popen[bytes], str]:
    """Start one; returns when it is healthy."""
    port = port or free_port()
    environ = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "HF_HOME": str(home / "no-hub-cache"),
        "HF_HUB_OFFLINE": "1",
        "MLX_DISABLE_COMPILE": "1",  # it would call a C++ compiler
        "OMP_NUM_THREADS": "1",
    }
    command = [python(), "-m", "mlx_lm", "server", "--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    with (home / "mlx-server.log").open("ab") as log:
        process = subprocess.Popen([*command, *arguments], env=environ, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return process, url
        time.sleep(0.1)
    process.kill()
    process.wait()
    told = (home / "mlx-server.log").read_text(encoding="utf-8", errors="replace")[-2000:]
    raise AssertionError(f"the server of MLX-LM did not start: {told}")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
