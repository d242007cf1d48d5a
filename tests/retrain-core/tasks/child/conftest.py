"""Targets that a child process can import, and a look at processes from outside."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from retrain.tasks.child.process import Child
from tests.kit import child_targets as targets


@pytest.fixture(scope="module")
def shared_child() -> Iterator[Child]:
    """A child with a hostile target; starting one for every test would take most of the time."""
    child = Child(targets.Hostile(), memory_gb=4, name="scoring")
    yield child
    child.close()


@pytest.fixture
def child(shared_child: Child) -> Child:
    """The same child, running."""
    if not shared_child.is_running:
        shared_child.start()
    return shared_child


@pytest.fixture
def gone() -> Callable[..., bool]:
    """`gone(pid, ...)`: whether all these processes have ended; waits for it, within reason."""

    def wait(*pids: int) -> bool:
        left = set(pids)
        for _ in range(400):
            left = {pid for pid in left if _is_alive(pid)}
            if not left:
                return True
            time.sleep(0.05)
        return False

    return wait


def _is_alive(pid: int) -> bool:
    told = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(told.stdout.strip()) and not told.stdout.strip().startswith("Z")
