"""Starts a real vLLM on the CPU, from the Python of its own virtualenv that the variable RETRAIN_VLLM_PYTHON
names."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

START_S = 300.0
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "2",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
OPTIONS = ("--dtype", "float32", "--max-model-len", "640", "--max-num-seqs", "16", "--enforce-eager")
ADAPTERS = ("--enable-lora", "--max-lora-rank", "64", "--max-loras", "2")


def python() -> str:
    """The server's Python; empty when there is none."""
    return os.environ.get("RETRAIN_VLLM_PYTHON", "")


@contextmanager
def vllm_serving(model: Path, log: Path, *options: str, takes_adapters: bool = True) -> Iterator[str]:
    """The URL of a server that runs for the duration of the block; what it says goes into a file."""
    options = (*(ADAPTERS if takes_adapters else ()), *options)
    port = free_port()
    process, url = launch(model, log, port, *options), f"http://127.0.0.1:{port}"
    try:
        wait_for(url, process, log)
        yield url
    finally:
        end(process, signal.SIGTERM, signal.SIGKILL)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(model: Path, log: Path, port: int, *options: str) -> subprocess.Popen[bytes]:
    """Start a server without waiting for it."""
    command = [python(), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
    with log.open("a", encoding="utf-8") as stream:
        return subprocess.Popen(
            [*command, "--port", str(port), *OPTIONS, *options],
            env={**os.environ, **ENVIRONMENT},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes], *signals: int) -> None:
    """Send signals, the next one where the last did not do; the server's engine is a process of its own."""
    for number in signals:
        try:
            os.killpg(process.pid, number)
            process.wait(20)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when the server answers; AssertionError when it ends before."""
    limit = time.monotonic() + START_S
    while time.monotonic() < limit:
        if process.poll() is not None:
            raise AssertionError(f"vLLM has ended: {log.read_text(encoding='utf-8')[-3000:]}")
        try:
            if httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"vLLM did not start: {log.read_text(encoding='utf-8')[-3000:]}")
