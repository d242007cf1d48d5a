"""Resolves `[model] model` to a readable folder or hub id, or refuses it within seconds."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from retrain.api import Config, ConfigError, Plugins, Problem

KEY = "model.model"
HUB_TIMEOUT_S = 10.0
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
log = logging.getLogger("retrain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where weights come from: `path` is a folder or hub id; `offline`: do not contact the hub, use its cache."""

    path: str
    offline: bool


def find_model(config: Config, plugins: Plugins) -> Source:
    """The source of `[model] model`; see `find_source`."""
    return find_source(config.model.model, config.place(KEY), plugins)


def find_source(name: str, where: str, plugins: Plugins) -> Source:
    """A local folder with safetensors, a model that a plugin ships, or a hub id; ConfigError if it is none of them."""
    located = plugins.locate_model(name)
    path = Path(located or name).expanduser()
    if located is not None or path.is_dir():
        check_folder(path, where)
        return Source(path=str(path.resolve()), offline=True)
    if path.exists():
        what = f"{name!r} is a file"
        raise ConfigError(Problem(where=where, what=what, fix="give the folder that holds config.json"))
    if name.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(name):
        what = f"there is no folder {name!r}"
        raise ConfigError(Problem(where=where, what=what, fix="give an existing folder, a hub id, or builtin:tiny"))
    return _on_the_hub(name, where)


def check_folder(folder: Path, where: str) -> None:
    """ConfigError unless the folder holds a readable config.json and safetensors weights."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
        document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            Problem(where=where, what=f"not a model folder, {error.filename} is missing", fix="give a complete folder")
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        fix = "make its config.json a readable UTF-8 file"
        raise ConfigError(Problem(where=where, what=f"{folder} cannot be read: {error}", fix=fix)) from None
    except json.JSONDecodeError as error:
        what = f"{folder / 'config.json'} is not valid JSON: {error}"
        raise ConfigError(Problem(where=where, what=what, fix="take the file from the model's source again")) from None
    if not isinstance(document, dict) or "model_type" not in document:
        what = f"{folder / 'config.json'} names no model_type"
        raise ConfigError(Problem(where=where, what=what, fix="give the folder of a transformers model"))
    if not any(name in ("model.safetensors", "model.safetensors.index.json") for name in names):
        pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
        why = f"it holds {pickled[0]}, and pickled weights can run code" if pickled else ""
        what = f"{folder} holds no model.safetensors"
        raise ConfigError(Problem(where=where, what=what, why=why, fix="save the model with save_pretrained()"))


def _on_the_hub(name: str, where: str) -> Source:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:  # one quick request first: loading by itself retries every file for half a minute
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
        return Source(path=name, offline=False)
    except GatedRepoError:
        what = f"the hub shows {name!r} only to users who accepted its terms"
        fix = "accept them on its page, then run `hf auth login`"
        raise ConfigError(Problem(where=where, what=what, fix=fix)) from None
    except RepositoryNotFoundError:
        what = f"there is no folder {name!r} here and no such model on the hub"
        fix = "correct the name; private models need `hf auth login`"
        raise ConfigError(Problem(where=where, what=what, fix=fix)) from None
    except Exception as error:  # any network error, whichever client library the hub package uses
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            log.info("The hub cannot be reached; using the cached copy of %s.", name)
            return Source(path=name, offline=True)
        what = f"{name!r} is no folder here, is not in the cache, and the hub cannot be reached: {first_line(error)}"
        raise ConfigError(Problem(where=where, what=what, fix="check the connection, or use builtin:tiny")) from None


def first_line(error: BaseException) -> str:
    """Type and first line of an error, for a message to the user."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
