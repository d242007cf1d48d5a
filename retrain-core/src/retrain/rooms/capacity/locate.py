"""Finds a folder with the `config.json` of `[model] model`; its weights are not needed."""

from __future__ import annotations

from pathlib import Path

from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.manager import Plugins
from retrain.rooms.text.hub import hub_options

FETCH_S = 20.0


def model_folder(config: Config, plugins: Plugins, *, fetch: bool) -> Path:
    """A local folder, a model that a plugin ships, or the hub's cache; `fetch` downloads a missing `config.json`.

    ConfigError if there is none.
    """
    name, where = config.model.model, config.place("model.model")
    located = plugins.notify("retrain_locate_model", model=name)
    folder = Path(located or name).expanduser()
    if located is not None or folder.is_dir():
        return folder
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        what = f"there is no model folder {name!r}"
        raise ConfigError(Problem(where=where, what=what, fix="give an existing folder, a hub id, or builtin:tiny"))
    return _on_the_hub(name, where, fetch=fetch)


def _on_the_hub(name: str, where: str, *, fetch: bool) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json")
        if not isinstance(cached, str):
            if not fetch:
                what = f"config.json of {name!r} is not in the hub's cache"
                raise ConfigError(
                    Problem(where=where, what=what, fix="`retrain capacity` downloads it: a few kilobytes")
                )
            cached = hf_hub_download(name, "config.json", etag_timeout=FETCH_S, **hub_options(name, where=where))
    except ConfigError:
        raise
    except Exception as error:  # the hub package lets the exceptions of its HTTP client through
        reason = " ".join(str(error).split())[:200]
        what = f"config.json of {name!r} cannot be fetched: {type(error).__name__}: {reason}"
        raise ConfigError(Problem(where=where, what=what, fix="check name and connection, or give a folder")) from None
    return Path(cached).parent
