"""A wheel with one module, to see where it is installed."""

from __future__ import annotations

import zipfile
from pathlib import Path

MODULE = "carried_one"
INFO = f"{MODULE}-1.0.dist-info"
FILES = {
    f"{MODULE}.py": "",
    f"{INFO}/METADATA": f"Metadata-Version: 2.1\nName: {MODULE}\nVersion: 1.0\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{INFO}/RECORD": "",
}


def write_wheel(folder: Path) -> Path:
    """Write it into a new folder."""
    folder.mkdir()
    with zipfile.ZipFile(folder / f"{MODULE}-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in FILES.items():
            wheel.writestr(name, text)
    return folder
