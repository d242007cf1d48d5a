"""Finds a folder with the `config.json` of a model; its weights are not needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.text.hub import hub_options
from retrain.tools.capacity.shapes import Document, known_document, nearest, write_document

FETCH_S = 20.0


def model_folder(
    config: Config, plugins: Plugins, name: str = "", *, fetch: bool, scratch: Path, sizes: Document | None = None
) -> Path:
    """A local folder, a model that a plugin ships, the hub's cache, or the table of known shapes, in this order.

    `name` is that of another model than the run's, a teacher for instance; `sizes` takes the place of the run's
    `config.json`. What is no folder yet is written below `scratch`. `fetch` downloads the `config.json` of a model that
    none of them has. ConfigError if there is none.
    """
    if sizes is not None and not name:
        return write_document(sizes, scratch / "sizes")
    where = config.place("teacher.model" if name else "model.model")
    name = name or config.model.model
    located = plugins.locate_model(name)
    folder = Path(located or name).expanduser()
    if located is not None or folder.is_dir():
        return folder
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        what = f"there is no model folder {name!r}"
        fix = "give an existing folder, a hub id, or builtin:tiny"
        fix = f"did you mean {near!r}?" if (near := nearest(name)) and "/" not in name else fix
        raise ConfigError(Problem(where=where, what=what, fix=fix))
    return _on_the_hub(name, where, fetch=fetch, scratch=scratch)


def _on_the_hub(name: str, where: str, *, fetch: bool, scratch: Path) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            return Path(cached).parent
        if document := known_document(name):
            return write_document(document, scratch / name)
        if not fetch:
            what = f"config.json of {name!r} is not in the hub's cache"
            raise ConfigError(Problem(where=where, what=what, fix="`retrain capacity` downloads it: a few kilobytes"))
        found = hf_hub_download(name, "config.json", etag_timeout=FETCH_S, **hub_options(name, where=where))
    except ConfigError as error:
        raise ConfigError(*(replace(problem, fix=_or_sizes(problem.fix, name)) for problem in error.problems)) from None
    except Exception as error:  # the hub package lets the exceptions of its HTTP client through
        reason = " ".join(str(error).split())[:200]
        what = f"config.json of {name!r} cannot be fetched: {type(error).__name__}: {reason}"
        fix = _or_sizes("check name and connection, or give a folder", name)
        raise ConfigError(Problem(where=where, what=what, fix=fix)) from None
    return Path(found).parent


def _or_sizes(fix: str, name: str) -> str:
    """The fix, and what a person can do who only wants to know whether the model would fit."""
    near = nearest(name)
    known = f"; the nearest model of known size is {near}" if near else ""
    return f"{fix}; `retrain capacity` also takes its sizes: --layers, --hidden, --heads, --vocabulary{known}"
