"""An adapter that is kept elsewhere, as a folder on this machine: a plugin knows how to get it."""

from __future__ import annotations

from retrain.kernel.config.resolved import Config
from retrain.kernel.plugins.first_party import install_line
from retrain.kernel.plugins.manager import Plugins
from retrain.rooms.squeeze.faults import unusable

REMOTE = "tinker://"


def local_copy(adapter: str, config: Config, plugins: Plugins) -> str:
    """The path itself, or the folder of a copy of a `tinker://` path; ConfigError when nobody can fetch that."""
    if not adapter.startswith(REMOTE):
        return adapter
    folder = plugins.notify("retrain_fetch_adapter", path=adapter, config=config)
    if folder is None:
        fix = f"{install_line('retrain-tinker')}, or download the adapter and give its folder"
        raise unusable(adapter, "is an adapter on a Tinker service, and no plugin can fetch it", fix=fix)
    return str(folder)
