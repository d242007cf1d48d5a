"""Features of some systems, no-ops on others: dying with the parent, adopting orphans, memory limits."""

from __future__ import annotations

import os
import signal
import sys
import time
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


# Processes that user code started and left behind: found by their parents, and killed.


# Several, because a process may start another just before it is killed.
ROUNDS = 50
PAUSE_S = 0.002


def has_children() -> bool:
    """True if this process has children, alive or not yet reaped; takes microseconds where `waitid` exists."""
    try:
        if hasattr(os, "waitid"):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        else:
            os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def descendants(root: int) -> set[int]:
    parents = _parents()
    found, last = set[int](), {root}
    while last:
        last = {pid for pid, parent in parents.items() if parent in last} - found
        found |= last
    return found


def kill_descendants(*, but: frozenset[int] = frozenset()) -> None:
    """Kill and reap every process below this one, except `but` and their descendants."""
    for _ in range(ROUNDS):
        kept = set(but).union(*(descendants(pid) for pid in but)) if but else set()
        found = descendants(os.getpid()) - kept
        if not found:
            return
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_S)
        for pid in found:
            with suppress(OSError):
                os.waitpid(pid, os.WNOHANG)


def _parents() -> dict[int, int]:
    if os.path.isdir("/proc/self"):
        found = []
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            with suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as stream:
                # Split behind the last parenthesis: the name of a program may hold blanks and parentheses.
                after_name = stream.read().rpartition(b")")[2].split()
                found.append((int(name), int(after_name[1])))
        return dict(found)
    import subprocess  # only where there is no /proc

    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False)
    rows = [line.split() for line in listed.stdout.splitlines()]
    own = {os.getpid(), *(int(row[0]) for row in rows if len(row) == 2)}
    return {int(pid): int(parent) for pid, parent in (row for row in rows if len(row) == 2) if int(pid) in own}
