"""Installed distributions and their files, read from metadata without importing any."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from importlib_metadata import PackageNotFoundError, distribution

if TYPE_CHECKING:
    from importlib_metadata import IPackagePath


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """The version in each distribution's metadata; those without metadata are left out."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = distribution(name).version
    return found


def files_of(name: str) -> tuple[IPackagePath, ...]:
    """The files of an installed distribution with their recorded hashes."""
    with suppress(PackageNotFoundError):
        return tuple(distribution(name).files or ())
    return ()


def installed_version(name: str) -> str:
    """Version of a distribution whose modules are present; empty otherwise. Imports nothing."""
    with suppress(PackageNotFoundError):
        found = distribution(name)
        # The module of the same name first: listing the files of a large distribution takes many times as long.
        if _can_import(re.sub(r"[-.]+", "_", name)):
            return found.version
        listed = (found.read_text("top_level.txt") or "").split()
        files = {file.parts[0] for file in found.files or () if str(file).endswith(".py")}
        modules = [part.removesuffix(".py") for part in (*listed, *files)]
        # Metadata that name no module say nothing about their modules.
        return found.version if not modules or any(map(_can_import, modules)) else ""
    return ""


def _can_import(module: str) -> bool:
    with suppress(ImportError, ValueError):
        return importlib.util.find_spec(module) is not None
    return False
