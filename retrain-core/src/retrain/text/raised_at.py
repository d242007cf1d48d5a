"""The line of a plugin that an error came from."""

from __future__ import annotations

import traceback
from contextlib import suppress
from pathlib import Path

from retrain.kernel import version

LIBRARY_FOLDERS = {"site-packages", "dist-packages"}


def raised_at(error: BaseException) -> str:
    """` (my_transforms.py:4)`: the innermost line of a plugin that raised, or that called what raised; else empty.

    A file that is installed as part of no library comes first, so that an error from within NumPy is shown where the
    user's own file called it.
    """
    package = Path(version.__file__).parents[1]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if package not in Path(f.filename).parents]
    foreign = [frame for frame in frames if not _is_library(Path(frame.filename))] or frames[:1]
    if not foreign:
        return ""
    file = Path(foreign[-1].filename)
    with suppress(OSError, ValueError):  # OSError: the current folder is gone; ValueError: the file is elsewhere
        file = file.relative_to(Path.cwd())
    return f" ({file}:{foreign[-1].lineno})"


def _is_library(file: Path) -> bool:
    return not LIBRARY_FOLDERS.isdisjoint(file.parts) or Path(traceback.__file__).parent in file.parents
