"""Features of some systems, no-ops elsewhere: dying with the parent, adopting orphans, memory limits."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress

SET_PARENT_DEATH_SIGNAL = 1
SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """SIGKILL for this process when its parent's thread ends (Linux); children do not inherit it."""
    _prctl(SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))


def adopt_orphans() -> None:
    """Make processes below us whose parent has died our children (Linux), so that they can be found."""
    _prctl(SET_CHILD_SUBREAPER, 1)


def limit_memory(size: int) -> None:
    """Limit the address space to `size` bytes, 0 = unlimited, and switch core dumps off."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if size:
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            if hard != resource.RLIM_INFINITY:
                size = min(size, hard)
            resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    with suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
