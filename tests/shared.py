"""What is dear to make and read by many tests: made once, by whichever process of the test run asks first."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that `make` has filled; the workers of pytest-xdist share it. Tests leave it as it is, or add to it."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # each worker has its own below
    folder, finished = base / f"shared-{name}", base / f"shared-{name}.finished"
    with (base / f"shared-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
        if not finished.exists():
            shutil.rmtree(folder, ignore_errors=True)  # left by a worker that failed halfway
            folder.mkdir()
            make(folder)
            finished.touch()
    return folder
