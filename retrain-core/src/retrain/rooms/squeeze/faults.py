"""What can be wrong with an adapter, as errors that name the file, the fault and the way out."""

from __future__ import annotations

from pathlib import Path

from retrain.kernel.errors import ConfigError, Problem
from retrain.rooms.text.terminal_text import printable


def unusable(path: Path | str, what: str, *, fix: str, why: str = "") -> ConfigError:
    """The error for an adapter or an output folder that cannot be used; foreign names in it cannot steer a terminal."""
    return ConfigError(Problem(where=printable(str(path)), what=printable(what), why=printable(why), fix=fix))
