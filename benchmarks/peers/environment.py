"""An environment for a peer, made once below `build/`, which git ignores: its needs must not meet ours."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = ROOT / "build/peers"


def peer_python(name: str, given: str = "") -> str:
    """The interpreter of the peer `name`: the one that was given, or that of an environment with `peers/name.txt`.

    The environment is made anew when that file or the constraints have changed. On Linux
    PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu keeps the CUDA libraries out of it.
    """
    if given:
        return given
    requirements, constraints = HERE / f"{name}.txt", ROOT / "constraints.txt"
    wanted = requirements.read_text(encoding="utf-8") + constraints.read_text(encoding="utf-8")
    folder = CACHE / name
    python, ready = folder / "bin/python", folder / "ready.txt"
    if ready.exists() and ready.read_text(encoding="utf-8") == wanted:
        return str(python)
    print(f"making an environment for {name} in {folder}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    options = ("--quiet", "--prefer-binary", "--constraint", str(constraints), "--requirement", str(requirements))
    subprocess.run([str(python), "-m", "pip", "install", *options], check=True)
    ready.write_text(wanted, encoding="utf-8")
    return str(python)
