"""Build `guard.cpp` against the installed PyTorch: `python -m tests.kit.fake_gpu.build_guard FILE.so`.

A process that is started with LD_PRELOAD naming that file has a device guard for "cuda:0". It exits with 3 where no C++
compiler is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

NO_COMPILER = 3
SOURCE = Path(__file__).with_name("guard.cpp")
PRELOAD = "LD_PRELOAD"


def build_guard(target: Path) -> bool:
    """Return False without a compiler."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return False
    import torch

    root = Path(torch.__file__).parent
    libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root / 'lib'}"]
    command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{root / 'include'}", str(SOURCE)]
    subprocess.run([*command, "-o", str(target), *libraries], check=True)
    return True


def is_guarded() -> bool:
    """True in a process that was started with the guard."""
    return "guard" in Path(os.environ.get(PRELOAD, "")).name


if __name__ == "__main__":
    sys.exit(0 if build_guard(Path(sys.argv[1])) else NO_COMPILER)
