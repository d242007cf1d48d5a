"""Whether the library of a recorder is there, asked before any model loads."""

from __future__ import annotations

from importlib.util import find_spec

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.first_party import install_line


def require(library: str, *, where: str) -> None:
    """ConfigError with the install line when `library`, named like its extra, is not installed; imports nothing."""
    spec = find_spec(library)
    if spec is None or spec.origin is None:  # no origin: a mere folder of that name, such as wandb leaves behind
        what = f"recorder {library!r} needs the package {library!r}, which is not installed"
        raise ConfigError(Problem(where=where, what=what, fix=install_line("retrain-core", library)))
