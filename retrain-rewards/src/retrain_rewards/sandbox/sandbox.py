"""The sandbox in which programs run: bubblewrap with nothing in it but an interpreter, where it works."""

from __future__ import annotations

import errno
import importlib.util
import platform
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from retrain.api import ConfigError
from retrain_rewards.faults import refused
from retrain_rewards.sandbox.process import Limits, Process, ProcessFault

PACKAGES = "/packages"
WORK = "/work"
WORK_BYTES = 2**26
DEV_BYTES = 2**16
LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/etc/ld.so.cache")
FIX = (
    "install bubblewrap (apt install bubblewrap) and allow it user namespaces (in a container, too), "
    "or set [reward] unsafe = true if nothing that these programs could do would matter here"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """The way to start a process: `command` in front of the interpreter's; without one there are only limits."""

    name: str
    command: tuple[str, ...] = ()
    calls: bytes = b""  # the filter of system calls
    packages: str = ""  # the folder of packages that programs may import, as they see it

    @property
    def is_real(self) -> bool:
        """True if it keeps programs from files, network and other processes."""
        return bool(self.command)

    def process(self, limits: Limits, link: socket.socket | None = None) -> Process:
        return Process(self.command, interpreter(), limits, calls=self.calls, link=link, packages=self.packages)


NO_SANDBOX = Sandbox(name="no sandbox")


def interpreter() -> str:
    return str(Path(getattr(sys, "_base_executable", "") or sys.executable).resolve())


@lru_cache(maxsize=1)
def find_sandbox() -> tuple[Sandbox | None, str]:
    """Find and try the sandbox of this machine; None and the reason without one."""
    found = shutil.which("bwrap")
    if found is None:
        return None, "bubblewrap (bwrap) is not installed"
    reason = ""
    for closed in (("--disable-userns",), ()):  # versions before 0.8 do not know it
        for calls in (system_call_filter(), b""):
            sandbox = Sandbox(name="bubblewrap", command=_bubblewrap(found, closed), calls=calls)
            try:
                with closing(sandbox.process(Limits())):
                    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
                    return replace(sandbox, name=version.strip() or sandbox.name), ""
            except (ProcessFault, OSError) as error:
                reason = reason or str(error)
    return None, f"{found} is installed but does not work here: {reason}"


def no_sandbox(where: str, reason: str) -> ConfigError:
    what = f"reward 'code' runs programs that a model wrote, and there is no sandbox for them: {reason}"
    return refused(where, code="reward.no-sandbox", what=what, fix=FIX)


def _bubblewrap(bwrap: str, more: tuple[str, ...]) -> tuple[str, ...]:
    """Return new namespaces of every kind, no rights, a read-only root with libraries and interpreter, one work folder.

    There is no /proc, no /tmp, no shell, and of /dev the two that an interpreter reads. Room on the work folder counts
    as memory, so it is limited.
    """
    stdlib = sysconfig.get_path("stdlib", vars={"base": sys.base_prefix})
    # the interpreter's shared library, where it has one
    library = Path(str(sysconfig.get_config_var("LIBDIR") or ""), str(sysconfig.get_config_var("LDLIBRARY") or ""))
    shared = [str(library.resolve())] if library.suffix in (".so", ".dylib") and library.is_file() else []
    own = dict.fromkeys((*LIBRARIES, f"{sys.base_prefix}/lib", stdlib, *shared))
    binds = [word for path in own if Path(path).exists() for word in ("--ro-bind", path, path)]
    return (
        *(bwrap, "--unshare-all", "--unshare-user", *more, "--die-with-parent", "--new-session"),
        *("--uid", "65534", "--gid", "65534", "--hostname", "sandbox", "--cap-drop", "ALL"),
        *(*binds, "--ro-bind", interpreter(), interpreter()),
        *("--size", str(DEV_BYTES), "--tmpfs", "/dev", "--dev-bind", "/dev/null", "/dev/null"),
        *("--dev-bind", "/dev/urandom", "/dev/urandom", "--remount-ro", "/dev"),
        *("--size", str(WORK_BYTES), "--tmpfs", WORK, "--chdir", WORK, "--remount-ro", "/"),
    )


def with_numpy(sandbox: Sandbox) -> Sandbox:
    spec = importlib.util.find_spec("numpy")
    if spec is None or spec.origin is None:
        raise ImportError("numpy is not installed")
    folder = Path(spec.origin).parent.parent
    if not sandbox.is_real:
        return replace(sandbox, packages=str(folder))
    found = [name for name in ("numpy", "numpy.libs") if (folder / name).is_dir()]
    binds = [word for name in found for word in ("--ro-bind", str(folder / name), f"{PACKAGES}/{name}")]
    return replace(sandbox, command=(sandbox.command[0], *binds, *sandbox.command[1:]), packages=PACKAGES)


ALLOW, DENY = 0x7FFF0000, 0x00050000
LOAD, EQUAL, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCHITECTURE_AT, FLAGS_AT = 0, 4, 16
CLONE_THREAD = 0x10000
X32 = 0x40000000
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
# Its flags lie in memory that a filter cannot read; without it the C library takes clone.
CLONE3 = 435
SAME_EVERYWHERE = (424, 425, 428, 429, 434, 438, 442)  # pidfd_*, io_uring_setup, open_tree, move_mount, mount_setattr
DENIED = {
    # fork, vfork, socket, ptrace, shmget, msgget, semget, add_key, request_key, keyctl, bpf, userfaultfd,
    # perf_event_open, unshare, setns, mount, umount2, pivot_root, memfd_create, process_vm_readv, process_vm_writev,
    # personality
    "x86_64": (57, 58, 41, 101, 29, 68, 64, 248, 249, 250, 321, 323, 298, 272, 308, 165, 166, 155, 319, 310, 311, 135),
    "aarch64": (198, 117, 194, 186, 190, 217, 218, 219, 280, 282, 241, 97, 268, 40, 39, 41, 279, 270, 271, 92),
}


def system_call_filter(machine: str = "") -> bytes:
    """Return the filter for a machine (`platform.machine()`), this one by default; empty where its calls are not known.

    A classic BPF program, as `bwrap --seccomp` reads it. A denied call fails with EPERM, so that a program gets an
    ordinary OSError. With it a program is one process, and its address space is all the memory that it has.
    """
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
    return struct.pack("=HBBI", operation, then, otherwise, value)
