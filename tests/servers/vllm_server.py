"""Starts a real vLLM on the CPU, from the Python of its own virtualenv that the variable RETRAIN_VLLM_PYTHON
names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kit.server_process import free_port, running

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
    url = f"http://127.0.0.1:{(port := free_port())}"
    options = (*(ADAPTERS if takes_adapters else ()), *options)
    with running(command(model, port, *options), f"{url}/health", log, start_s=START_S, environ=environ()):
        yield url


def command(model: Path, port: int, *options: str) -> list[str]:
    start = [python(), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
    return [*start, "--port", str(port), *OPTIONS, *options]


def environ() -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT}
