"""What a rerun would run, reach and install, for the user who has to decide. Names in it are a stranger's text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from retrain.tools.pack.contents import Contents
from retrain.tools.pack.environment import forced
from retrain.tools.pack.packed_wheels import CheckedWheel
from retrain.tools.pack.places import is_importable

MOST_TEXT, MOST_CHANGED = 120, 3
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*[.:][A-Za-z_]\w*")  # as the name of a function: `my_rewards.score`
_URL = re.compile(r"[A-Za-z][\w+.-]*://[^\s\"'<>]+")


def listing(contents: Contents, wheels: Sequence[CheckedWheel], *, here: bool) -> list[str]:
    """One line each: code by file and hash, programs, hosts, variables, places outside, wheels, packages."""
    runs = (
        f"campaign of {len(contents.runs)} runs" if contents.is_campaign else f"run of {contents.runs[0].steps} steps"
    )
    rows = [f"{contents.opened.file}: {contents.name}, a {runs}, of Python {contents.python}"]
    rows.append("It would run, with your rights:")
    codes = [file for file in contents.files if file.kind == "code" or is_importable(file.place)]
    rows += [f"  code     {file.place} ({file.size} bytes, hash {file.hash})" for file in codes]
    rows += [*_from_config(contents)] + ([] if codes else ["  code     none, except its plugins"])
    if here:
        return [*rows, "  plugins  those of this environment, in place of the pack's wheels; nothing is installed"]
    rows.append("It would install this and nothing else, without requirements of these:")
    rows += map(_of_wheel, wheels)
    shown = ", ".join(f"{name} {each['version']} ({each['digest'][:12]})" for name, each in contents.packages.items())
    return [*rows, f"  packages {len(contents.packages)}, as wheels from the index of your pip, by hash: {shown}"]


def _of_wheel(wheel: CheckedWheel) -> str:
    head = f"{wheel.packed.name} {wheel.packed.version}, from the pack, sha256 {wheel.sha256}"
    if not wheel.is_ours:
        return f"  plugin   {head}"
    if not wheel.changed:
        return f"  retrain  {head}: the same files as yours"
    more = f" and {len(wheel.changed) - MOST_CHANGED} more" if len(wheel.changed) > MOST_CHANGED else ""
    return f"  retrain  {head}: UNKNOWN, not the files of yours: {', '.join(wheel.changed[:MOST_CHANGED])}{more}"


def _from_config(contents: Contents) -> Iterator[str]:
    """Lines about values of the configuration that run a program, or reach beyond the folder of the rerun."""
    tables = forced(contents.config())
    places = {str(part) for file in contents.files for part in (file.place, *PurePosixPath(file.place).parents)}
    model = str(tables.get("model", {}).get("model", ""))
    if model and not model.startswith("builtin:") and model.rstrip("/") not in places:
        yield f"  download {model[:MOST_TEXT]}, from the hub unless it is a folder (model.model)"
    for key, value in _texts(tables):
        text, name = value[:MOST_TEXT], key.rpartition(".")[2]
        if name == "trust_remote_code":
            yield f"  code     of the model, from wherever it comes ({key} = true)"
        elif name in ("command", "argv") or name.endswith("_command"):
            yield f"  program  {text} ({key})"
        elif urls := _URL.findall(value):
            yield from (f"  connects {_host(url)} ({key})" for url in urls)
        elif name.endswith("_env"):
            yield f"  sends    the variable {text}, if you --pass it ({key})"
        elif value.startswith(("/", "~", "\\")) or ".." in PurePosixPath(value).parts:
            yield f"  outside  {text} ({key})"
        elif _DOTTED.fullmatch(value) and value not in places and key != "model.model":
            yield f"  imports  {text} ({key})"


def _host(url: str) -> str:
    try:
        return f"{urlsplit(url).scheme}://{urlsplit(url).netloc.rpartition('@')[2]}"[:MOST_TEXT]
    except ValueError:
        return url[:MOST_TEXT]


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text of a configuration with its key, and the switches that are on."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _texts(each, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each, key)
    elif isinstance(value, str) and value:
        yield key, value
    elif value is True:
        yield key, "true"
