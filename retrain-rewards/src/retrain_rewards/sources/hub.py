"""Loads a public data set through `datasets`, from the hub or from its cache; fails quickly when neither has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from retrain.api import ConfigError, Problem

PROBE_TIMEOUT_S = 5.0
COPY = "a folder with a file or sub-folder per subject"


def hub_rows(
    name: str, subset: str, split: str, *, where: str, revision: str = "", copy: str = COPY
) -> Iterator[Mapping[str, Any]]:
    """Rows of one subset and split. ConfigError when it is neither reachable nor cached, within seconds.

    An empty subset is the data set's own default, an empty revision its newest; `copy` says what a local one may be.

    `datasets` alone retries an unreachable hub for half a minute per subset. So one request comes first, and if the hub
    does not answer it, only the cache is used.
    """
    import datasets

    reachable, was_offline = _reachable(), datasets.config.HF_HUB_OFFLINE
    try:
        datasets.config.HF_HUB_OFFLINE = not reachable
        data = datasets.load_dataset(name, subset or None, split=split, revision=revision or None)
    except Exception as error:  # network, hub, cache and file errors alike: each its own class
        reason = " ".join(str(error).split())
        which = ", ".join(filter(None, (subset, f"split {split}", revision)))
        fault = f"no answer from {datasets.config.HF_ENDPOINT}"
        if was_offline:
            fault = "offline mode is set (HF_HUB_OFFLINE)"
        what = f"data set {name} ({which}) cannot be loaded"
        why = f"{type(error).__name__}: {reason}" if reachable else f"{fault}, and not in the cache"
        fix = f"connect once, or set [data] path to a local copy: {copy}"
        raise ConfigError(Problem(where=where, what=what, why=why, fix=fix)) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline
    yield from data


def saved_rows(folder: Path, split: str, *, where: str) -> Iterator[Mapping[str, Any]]:
    """Rows of a folder that `save_to_disk` of `datasets` wrote; ConfigError names the splits that it has instead."""
    import datasets

    try:
        data = datasets.load_from_disk(str(folder))
    except Exception as error:  # pyarrow and datasets each raise their own
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        what, fix = f"{str(folder)!r} cannot be read as a saved data set", "write it again with save_to_disk"
        raise ConfigError(Problem(where=where, what=what, why=reason, fix=fix)) from error
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            fix = f'[data] options = {{ split = "{next(iter(data), "NAME")}" }}'
            what = f"{str(folder)!r} has no split {split!r}"
            raise ConfigError(Problem(where=where, what=what, why=f"found: {', '.join(data)}", fix=fix))
        data = data[split]
    yield from data


def is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _reachable() -> bool:
    """Whether the hub answers one request, with any status; the libraries' offline mode is respected."""
    import datasets
    import huggingface_hub

    if datasets.config.HF_HUB_OFFLINE:
        return False
    try:
        huggingface_hub.get_session().head(datasets.config.HF_ENDPOINT, timeout=PROBE_TIMEOUT_S)
    except Exception:  # the HTTP library's own class, which depends on the version of huggingface_hub
        return False
    return True
