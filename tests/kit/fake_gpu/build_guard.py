"""Build `guard.cpp` against the installed PyTorch: `python -m tests.kit.fake_gpu.build_guard FILE.so`.

A process that is started with LD_PRELOAD naming that file has a device guard for "cuda:0". Where it cannot be built the
command says why and exits with 3.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

NOT_BUILT = 3
SOURCE = Path(__file__).with_name("guard.cpp")
PRELOAD = "LD_PRELOAD"


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def refusal() -> str | None:
    """Return why the guard cannot be built here."""
    if torch.version.cuda is not None:
        return f"PyTorch {torch.__version__} has a guard for CUDA already: install its build for CPUs"
    if shutil.which(compiler()) is None:
        return f"there is no C++ compiler {compiler()}: install g++, or name one in CXX"
    return None


def build_guard(target: Path) -> None:
    root = Path(torch.__file__).parent
    libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root / 'lib'}"]
    command = [compiler(), "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{root / 'include'}", str(SOURCE)]
    subprocess.run([*command, "-o", str(target), *libraries], check=True)


def is_guarded() -> bool:
    """True in a process that was started with the guard."""
    return "guard" in Path(os.environ.get(PRELOAD, "")).name


if __name__ == "__main__":
    if why := refusal():
        print(why)
        sys.exit(NOT_BUILT)
    build_guard(Path(sys.argv[1]))
