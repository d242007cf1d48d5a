"""The installed `retrain` script, run the way a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(sys.executable).with_name("retrain")


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`script("explain", "--json", environ={})`: the real script in `tmp_path`, piped."""

    def call(*arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "HF_HUB_OFFLINE": "1", **(environ or {})}
        return subprocess.run(
            [str(SCRIPT), *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
        )

    return call
