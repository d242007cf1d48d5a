"""retrain: a plugin-first, TOML-first trainer for reinforcement learning with verifiable rewards.

`train`, `load` and `compare` are the commands as functions, and `Run` is a run folder as an object. Each is imported on
first use, so that `import retrain` takes no time. The names are in `__init__.pyi`.
"""

from retrain.kernel.lazy_names import lazy_names
from retrain.kernel.version import __version__ as __version__

__distribution__ = "retrain-core"  # the public package `retrain` has the same import name: see `retrain.cli`
__getattr__, __all__ = lazy_names(__name__, __file__)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
