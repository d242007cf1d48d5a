"""Has the system load PyTorch's libraries while Python imports other things.

Mapping and linking hundreds of megabytes is a fifth of what `import torch` takes on a CPU, more with CUDA, and it needs
no Python: a thread that has called `dlopen` does it on another core. The import finds the libraries loaded.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
from pathlib import Path

# in the order and with the flags in which `import torch` asks for them
LIBRARIES = (("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL), ("libtorch.so", os.RTLD_NOW))


def preload_libraries() -> None:
    """Begin, and return at once; nothing happens on other systems than Linux, or when PyTorch is here already.

    Whatever cannot be loaded is left to the import, and so is telling what is wrong.
    """
    if not sys.platform.startswith("linux") or "torch" in sys.modules:
        return
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return
    folder = Path(spec.submodule_search_locations[0]) / "lib"
    threading.Thread(target=_load, args=(folder,), name="preload-torch", daemon=True).start()


def _load(folder: Path) -> None:
    # called as a plain function, which lets go of Python's lock; `ctypes.CDLL(path)` keeps it
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for name, flags in LIBRARIES:
        dlopen(os.fsencode(folder / name), flags)
