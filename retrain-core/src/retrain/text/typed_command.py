"""Writes the commands that a user may type next, so that they work from the current folder as they are."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def program(name: str = "retrain") -> str:
    """A program of this Python environment as the user's shell finds it: its name, or a path if the name is not enough.

    The path is relative for an environment below the current folder that is not activated, such as `.venv`.
    """
    own = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if not own.exists() or (found and _is_same(Path(found), own)):
        return name
    return shlex.quote(os.path.relpath(own) if own.is_relative_to(Path.cwd()) else str(own))


def _is_same(found: Path, own: Path) -> bool:
    """True for one file. The `python` of two environments may be links to one file, so their folders decide."""
    is_linked = own.name != "python" and found.samefile(own)  # as pipx links it
    return found.parent.resolve() == own.parent.resolve() or is_linked
