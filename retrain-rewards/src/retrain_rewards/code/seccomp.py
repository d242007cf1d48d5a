"""A filter of system calls for the sandbox: one process without children, sockets or other ways to hold memory.

A classic BPF program, as `bwrap --seccomp` reads it. A denied call fails with EPERM, so that a program gets an ordinary
OSError. With it a program is one process, and the limit of its address space is the limit of all its memory.
"""

from __future__ import annotations

import errno
import platform
import struct

ALLOW, DENY = 0x7FFF0000, 0x00050000
LOAD, EQUAL, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCHITECTURE_AT, FLAGS_AT = 0, 4, 16
CLONE_THREAD = 0x10000
X32 = 0x40000000
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435  # its flags lie in memory that a filter cannot read; without it the C library takes clone
SAME_EVERYWHERE = (424, 425, 428, 429, 434, 438, 442)  # pidfd_*, io_uring_setup, open_tree, move_mount, mount_setattr
DENIED = {
    # fork, vfork, socket, ptrace, shmget, msgget, semget, add_key, request_key, keyctl, bpf, userfaultfd,
    # perf_event_open, unshare, setns, mount, umount2, pivot_root, memfd_create, process_vm_readv, process_vm_writev,
    # personality
    "x86_64": (57, 58, 41, 101, 29, 68, 64, 248, 249, 250, 321, 323, 298, 272, 308, 165, 166, 155, 319, 310, 311, 135),
    "aarch64": (198, 117, 194, 186, 190, 217, 218, 219, 280, 282, 241, 97, 268, 40, 39, 41, 279, 270, 271, 92),
}


def program(machine: str = "") -> bytes:
    """The filter for a machine (`platform.machine()`), this one by default; empty where its calls are not known."""
    machine = machine or platform.machine()
    if machine not in AUDIT:
        return b""
    deny, allow = _step(RETURN, DENY | errno.EPERM), _step(RETURN, ALLOW)
    steps = [
        _step(LOAD, ARCHITECTURE_AT),
        _step(EQUAL, AUDIT[machine], otherwise=0, then=1),
        deny,
        _step(LOAD, NUMBER_AT),
        _step(AT_LEAST, X32, then=0, otherwise=1),
        deny,
        _step(EQUAL, CLONE3, then=0, otherwise=1),
        _step(RETURN, DENY | errno.ENOSYS),
    ]
    for number in (*DENIED[machine], *SAME_EVERYWHERE):
        steps += [_step(EQUAL, number, then=0, otherwise=1), deny]
    steps += [
        _step(EQUAL, CLONE[machine], then=1, otherwise=0),
        allow,
        _step(LOAD, FLAGS_AT),
        _step(HAS_BITS, CLONE_THREAD, then=1, otherwise=0),
        deny,
        allow,
    ]
    return b"".join(steps)


def _step(operation: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    """One instruction; a jump leaves out so many of the following ones."""
    return struct.pack("=HBBI", operation, then, otherwise, value)
