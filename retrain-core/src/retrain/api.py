"""The public names for plugins, in addition to `retrain.advantages` and `retrain.testing`; frozen by a test.

Each name is imported on first use: a `plugin.py` that takes `PluginSpec` and `hookimpl` from here imports neither
pydantic nor numpy. `retrain --help` imports every `plugin.py`, and so stays fast. The names are in `api.pyi`.
"""

from retrain.kernel.lazy_names import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)


def __dir__() -> list[str]:
    return __all__
