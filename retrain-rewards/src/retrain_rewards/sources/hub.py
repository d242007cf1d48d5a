"""Loads a public data set through `datasets`, from the hub or from its cache; fails quickly when neither has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from retrain.api import ConfigError, Problem

PROBE_TIMEOUT_S = 5.0


def hub_rows(name: str, subset: str, split: str, *, where: str) -> Iterator[Mapping[str, Any]]:
    """Rows of one subset and split. ConfigError when it is neither reachable nor cached, within seconds.

    `datasets` alone retries an unreachable hub for half a minute per subset. So one request comes first, and if the hub
    does not answer it, only the cache is used.
    """
    import datasets

    reachable = _reachable()
    try:
        if reachable:
            data = datasets.load_dataset(name, subset, split=split)
        else:
            with _offline():
                data = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # network, hub, cache and file errors alike: each its own class
        reason = " ".join(str(error).split())
        is_offline = datasets.config.HF_HUB_OFFLINE
        fault = (
            "offline mode is set (HF_HUB_OFFLINE)" if is_offline else f"no answer from {datasets.config.HF_ENDPOINT}"
        )
        silent = f"{fault}, and not in the cache"
        raise ConfigError(
            Problem(
                where=where,
                what=f"data set {name} ({subset}, split {split}) cannot be loaded",
                why=f"{type(error).__name__}: {reason}" if reachable else silent,
                fix="connect once, or set [data] path to a local copy: a folder with a file or sub-folder per subject",
            )
        ) from error
    yield from data


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


@contextmanager
def _offline() -> Iterator[None]:
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
