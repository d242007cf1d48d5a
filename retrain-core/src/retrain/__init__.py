"""retrain: a plugin-first, TOML-first trainer for reinforcement learning with verifiable rewards.

`train`, `load` and `compare` are the commands as functions, and `Run` is a run folder as an object. Each is imported on
first use, so that `import retrain` takes no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from retrain.kernel.version import __version__ as __version__

if TYPE_CHECKING:
    from retrain.facade.comparison import Comparison, compare
    from retrain.facade.run import Run, RunStopped, load, train

__all__ = ["Comparison", "Run", "RunStopped", "compare", "load", "train"]
__distribution__ = "retrain-core"  # the public package `retrain` has the same import name: see `retrain.cli`

_HOMES = {
    "Comparison": "comparison",
    "compare": "comparison",
    "Run": "run",
    "load": "run",
    "RunStopped": "run",
    "train": "run",
}


if not TYPE_CHECKING:  # type checkers read the imports above and so find misspelt names

    def __getattr__(name: str) -> object:
        """Import a public name on first use."""
        if name not in _HOMES:
            raise AttributeError(f"module 'retrain' has no attribute {name!r}")
        return getattr(import_module(f"retrain.facade.{_HOMES[name]}"), name)

    def __dir__() -> list[str]:
        return [*__all__, "__version__"]
