"""The real `transformers serve` around `builtin:tiny`, as a subprocess: it answers, and drops log-probabilities.

It needs FastAPI beside what the tests have. The model is served from a hub cache that is made up, because the server
lists nothing else.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.kit.mlx_server import free_port

REVISION = "0" * 40
START_S = 120.0


@contextmanager
def transformers_serving(model: Path, home: Path) -> Iterator[str]:
    """The URL of a server of `retrain/<name of the model's folder>`, which runs for the duration of the block."""
    if any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn", "openai")):
        pytest.skip("fastapi, uvicorn and openai, which `transformers serve` needs, are not installed")
    name = _cached(model, home)
    port = free_port()
    environ = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    options = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", name, *options]
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(process, url, home / "server.log")
        yield url
    finally:
        process.kill()
        process.wait()


def _cached(model: Path, home: Path) -> str:
    folder = home / "hub" / f"models--retrain--{model.name}"
    shutil.copytree(model, folder / "snapshots" / REVISION)
    (folder / "blobs").mkdir()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(REVISION)
    return f"retrain/{model.name}"


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    told = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise AssertionError(f"transformers serve did not start: {told}")
