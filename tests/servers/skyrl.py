"""Starts and stops SkyRL-tx, the Tinker service of one's own, on a copy of the built-in tiny model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from retrain_local.plugin import BUILTIN_MODELS
from tests.kit import server_process

PYTHON = "RETRAIN_SKYRL_PYTHON"  # interpreter of the virtualenv that SkyRL-tx is installed in
PLACES = 4  # adapters at a time; on a CPU each costs time in every forward
FIXED_SHAPES = {"sample_max_num_sequences": 64, "train_micro_batch_size": 32}  # so that little is compiled
START_S = 180


@dataclass(frozen=True, slots=True, kw_only=True)
class SkyRL:
    """A running server: its URL, and the folder of the model that it was started with, which is the model's name."""

    url: str
    model: Path
    process: subprocess.Popen[bytes]


def copy_model(source: Path, target: Path) -> Path:
    """The model with a config that transformers 4, which the server has, understands as well."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    path = target / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"rope_theta": config["rope_parameters"]["rope_theta"]}), encoding="utf-8")
    return target


@contextmanager
def tiny_server(folder: Path) -> Iterator[SkyRL]:
    """A server of the built-in tiny model; skips the test where SkyRL-tx is not installed."""
    if PYTHON not in os.environ:
        pytest.skip(f"{PYTHON} does not name the Python that SkyRL-tx is installed for: nox -s server-tinker")
    folder.mkdir(exist_ok=True)
    with running(folder, copy_model(BUILTIN_MODELS["tiny"], folder / "tiny")) as started:
        yield started


@contextmanager
def running(folder: Path, model: Path, *, port: int = 0) -> Iterator[SkyRL]:
    """Start a server whose checkpoints and database are in `folder`, wait until it answers, and end it."""
    python = os.environ[PYTHON]
    tools = folder / "bin"
    tools.mkdir(parents=True, exist_ok=True)
    stand_in = tools / "uv"  # the server starts its engine with `uv run ... -m tx.tinker.engine ...`
    stand_in.write_text(f'#!/bin/sh\nwhile [ "$1" != "-m" ]; do shift; done\nexec "{python}" "$@"\n', encoding="utf-8")
    stand_in.chmod(0o755)
    port = port or server_process.free_port()
    sizes = {"max_lora_adapters": PLACES, "max_lora_rank": 16, **FIXED_SHAPES}
    command = [python, "-m", "tx.tinker.api", "--host", "127.0.0.1", "--port", str(port), "--base-model", str(model)]
    command += ["--checkpoints-base", str(folder / "checkpoints"), "--database-url", f"sqlite:///{folder}/tinker.db"]
    command += ["--backend-config", json.dumps(sizes)]
    command += ["--session-timeout-sec", "60", "--session-cleanup-interval-sec", "5"]
    environ = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    url, log = f"http://127.0.0.1:{port}", folder / "server.log"
    process = server_process.launch(command, log, environ, folder)
    try:
        server_process.wait_for(f"{url}/api/v1/healthz", process, log, START_S)
        yield SkyRL(url=url, model=model, process=process)
    finally:
        server_process.end(process, signal.SIGTERM)
