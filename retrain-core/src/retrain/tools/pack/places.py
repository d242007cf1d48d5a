"""Which files of a pack may be laid into the folder of a rerun: none that a tool would run or obey unlisted.

The folder is on the import path of the run, for the sake of the pack's code. So code is listed by file and hash, and
data may be nothing that Python imports.
"""

from __future__ import annotations

import sys
from importlib.machinery import all_suffixes
from pathlib import PurePosixPath

from retrain.kernel.plugins.first_party import own_distributions

BYTE_CODE = (".pyc", ".pyo")  # runs in place of the listed source, whatever that says
IMPORTED = (*all_suffixes(), *BYTE_CODE, ".py", ".pyw", ".pyd", ".so", ".dll", ".dylib", ".pth", ".egg", ".egg-link")
METADATA = (".dist-info", ".egg-info", ".egg", ".egg-link")
AT_START = frozenset({"sitecustomize", "usercustomize"})  # Python imports them by itself


def own_module(distribution: str) -> str:
    """The top-level module of one of our distributions."""
    return "retrain" if distribution == "retrain-core" else distribution.replace("-", "_")


def shadowed(name: str) -> bool:
    """True if a top-level module of this name would take the place of Python's, or of one of ours."""
    ours = {own_module(each) for each in own_distributions()}
    return name.casefold() in {*map(str.casefold, sys.stdlib_module_names), *AT_START, *ours}


def top_level(path: str) -> str:
    """The name under which a file below an import folder is found: `a/b.py` and `a.cpython-311-darwin.so` are `a`."""
    return path.partition("/")[0].partition(".")[0]


def is_importable(path: str) -> bool:
    """True if Python may run this file as a module, or read it at its start."""
    return path.casefold().endswith(tuple(map(str.casefold, IMPORTED)))


def refusal(kind: str, place: str) -> str:
    """The reason for which a file of a kind (`code`, `data`, `model`) may not be laid at a place; empty if it may."""
    parts = PurePosixPath(place.casefold()).parts
    if any(part.startswith(".") for part in parts):
        return "is hidden: tools read such files as their settings"
    if any(part.endswith(METADATA) for part in parts):
        return "would be taken for an installed distribution"
    if place.casefold().endswith(BYTE_CODE):
        return "is byte code"
    if kind == "data" and is_importable(place):
        return "is data, and Python would import it"
    if is_importable(place) and shadowed(top_level(place)):
        return f"would be imported in place of the module {top_level(place)!r}"
    return ""
