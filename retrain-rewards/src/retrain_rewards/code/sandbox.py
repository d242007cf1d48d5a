"""The sandbox in which programs run: bubblewrap with nothing in it but an interpreter, where it works."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from retrain_rewards.code import seccomp
from retrain_rewards.code.process import Limits, Process, ProcessFault

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
    """How a process of the sandbox is started: `command` in front of the interpreter's own, and its name.

    An empty command is no sandbox at all: a child process in a folder of its own, with an empty environment and limits.
    """

    name: str
    command: tuple[str, ...] = ()
    calls: bytes = b""  # the filter of system calls
    packages: str = ""  # the folder of packages that programs may import, as they see it

    @property
    def is_real(self) -> bool:
        """Whether it keeps programs from files, network and other processes."""
        return bool(self.command)


NO_SANDBOX = Sandbox(name="no sandbox")


def interpreter() -> str:
    """The interpreter that runs programs: the one that this environment was made from, without its packages."""
    return str(Path(getattr(sys, "_base_executable", "") or sys.executable).resolve())


@lru_cache(maxsize=1)
def find_sandbox() -> tuple[Sandbox | None, str]:
    """The sandbox that works on this machine, tried out; None and the reason where there is none."""
    found = shutil.which("bwrap")
    if found is None:
        return None, "bubblewrap (bwrap) is not installed"
    reason = ""
    for closed in (("--disable-userns",), ()):  # versions before 0.8 do not know it
        for calls in (seccomp.program(), b""):
            sandbox = Sandbox(name=_version(found), command=_bubblewrap(found, closed), calls=calls)
            try:
                with Process(sandbox.command, interpreter(), Limits(), calls=calls):
                    return sandbox, ""
            except (ProcessFault, OSError) as error:
                reason = reason or str(error)
    return None, f"{found} is installed but does not work here: {reason}"


def _version(bwrap: str) -> str:
    shown = subprocess.run([bwrap, "--version"], capture_output=True, text=True, check=False).stdout
    return shown.strip() or "bubblewrap"


def _bubblewrap(bwrap: str, more: tuple[str, ...]) -> tuple[str, ...]:
    """New namespaces of every kind, no rights, a read-only root with libraries and the interpreter, one work folder.

    There is no /proc, no /tmp, no shell, and of /dev the two that an interpreter reads. Room on the work folder counts
    as memory, so it is limited.
    """
    stdlib = sysconfig.get_path("stdlib", vars={"base": sys.base_prefix})
    own = dict.fromkeys((*LIBRARIES, f"{sys.base_prefix}/lib", stdlib, *_shared()))
    binds = [word for path in own if Path(path).exists() for word in ("--ro-bind", path, path)]
    return (
        *(bwrap, "--unshare-all", "--unshare-user", *more, "--die-with-parent", "--new-session"),
        *("--uid", "65534", "--gid", "65534", "--hostname", "sandbox", "--cap-drop", "ALL"),
        *(*binds, "--ro-bind", interpreter(), interpreter()),
        *("--size", str(DEV_BYTES), "--tmpfs", "/dev", "--dev-bind", "/dev/null", "/dev/null"),
        *("--dev-bind", "/dev/urandom", "/dev/urandom", "--remount-ro", "/dev"),
        *("--size", str(WORK_BYTES), "--tmpfs", WORK, "--chdir", WORK, "--remount-ro", "/"),
    )


def _shared() -> list[str]:
    """Folder of the interpreter's shared library, where it has one."""
    library = Path(str(sysconfig.get_config_var("LIBDIR") or ""), str(sysconfig.get_config_var("LDLIBRARY") or ""))
    return [str(library.resolve())] if library.suffix in (".so", ".dylib") and library.is_file() else []


def with_numpy(sandbox: Sandbox) -> Sandbox:
    """The same sandbox with the numpy of this environment in it; ImportError where it is not installed."""
    spec = importlib.util.find_spec("numpy")
    if spec is None or spec.origin is None:
        raise ImportError("numpy is not installed")
    folder = Path(spec.origin).parent.parent
    if not sandbox.is_real:
        return replace(sandbox, packages=str(folder))
    found = [name for name in ("numpy", "numpy.libs") if (folder / name).is_dir()]
    binds = [word for name in found for word in ("--ro-bind", str(folder / name), f"{PACKAGES}/{name}")]
    return replace(sandbox, command=(sandbox.command[0], *binds, *sandbox.command[1:]), packages=PACKAGES)
