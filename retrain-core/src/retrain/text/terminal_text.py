"""Text for terminals and logs: log levels of console lines, untrusted text made harmless, sparklines."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

# Values of TERM for terminals that cannot move their cursor.
DUMB = ("dumb", "unknown")
BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 60
# Between DEBUG and INFO: lines that the live panel of a terminal makes superfluous.
PROGRESS_LEVEL = 15
# Between INFO and WARNING: the end of a run is reported even with --quiet.
OUTCOME_LEVEL = 25
QUIET_FLAGS = ("-q", "--quiet")


def printable(text: str) -> str:
    """Text with control characters replaced, so that model output or data cannot steer a terminal."""
    return "".join(c if c.isprintable() else "�" for c in text)


def harmless_lines(text: str) -> str:
    """A text of several lines, each `printable`."""
    return "\n".join(map(printable, text.expandtabs().splitlines()))


def is_redrawable(stream: TextIO) -> bool:
    """True if a stream is a terminal that can move its cursor; TERM=dumb cannot."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in DUMB


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Values in [0, 1] as block characters, squeezed by averaging to at most `width` of them."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    return "".join(BLOCKS[min(int(max(v, 0.0) * len(BLOCKS)), len(BLOCKS) - 1)] for v in means)


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
