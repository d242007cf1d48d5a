"""Campaigns of the toy policy, written to a file and run as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import retrain
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.plugins.manager import Plugins
from retrain.rooms.campaign.load import Campaign, load_campaign

SOURCES = Path(retrain.__file__).parents[1]
TWO = """
[[campaign.conditions]]
advantage_mode = "toy_raw"
transform_mode = "toy_flat"

[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "toy_index"
"""
BASE = """
[backend]
backend = "toy"
devices = "cpu"

[algorithm]
uncertainty_kind = "toy_nll"

[data]
source = "toy"

[reward]
type = "toy"

[training]
batch_size = 3
group_size = 4
max_tokens = 6
save_every = 1
grace_s = 5.0

[scoring]
workers = 1

[logging]
log_dir = "out"
"""


@pytest.fixture
def write(tmp_path: Path, toys: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`write(campaign="seeds = [1]", conditions=TWO, more="")`: a file of toys, in the folder that is now current."""
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join([str(toys), str(SOURCES), *(p for p in sys.path if p.endswith("/src"))])
    monkeypatch.setenv("PYTHONPATH", path)

    def make(campaign: str = "seeds = [1, 2]\nmax_steps = 4", conditions: str = TWO, more: str = "") -> Path:
        text = f'[campaign]\n{campaign}\n{conditions}\n{BASE}\n[model]\nmodel = "{tokenizer_folder}"\n{more}'
        Path("c.toml").write_text(text, encoding="utf-8")
        return Path("c.toml")

    return make


@pytest.fixture
def toy_plugins(toys: Path) -> Plugins:
    """Everything installed, and the toys."""
    return load_plugins({})


@pytest.fixture
def load_text(write: Callable[..., Path], toy_plugins: Plugins) -> Callable[..., Campaign]:
    """`load_text(campaign, conditions, more, arguments=[...])`: the campaign, or its ConfigError."""

    def load(*texts: str, arguments: tuple[str, ...] = ()) -> Campaign:
        return load_campaign([str(write(*texts)), *arguments], toy_plugins)

    return load


@pytest.fixture
def start(write: Callable[..., Path]) -> Callable[..., subprocess.Popen[str]]:
    """`start("c.toml", ...)`: `python -m retrain` in the current folder, in a session of its own."""

    def call(*arguments: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "retrain", *arguments],
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return call


@pytest.fixture
def finish(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., tuple[int, str, str]]:
    """The same to its end: exit code, stdout, stderr."""

    def call(*arguments: str, **environ: str) -> tuple[int, str, str]:
        process = start(*arguments, **environ)
        out, err = process.communicate(timeout=280)
        return process.returncode, out, err

    return call
