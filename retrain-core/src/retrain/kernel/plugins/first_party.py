"""Which of our own distributions provides a name, so that the message about a missing one can give its install line.

`first_party.toml` lists every name that the documentation mentions, and the defaults that those distributions supply.
"""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path
from typing import Any

from retrain.kernel.declared import Kind
from retrain.kernel.plugins.installed import installed_version, source_folder

CORE = "retrain-core"
DEFAULT = "default"  # key of a kind's default in the table


@cache
def _names() -> dict[str, dict[str, Any]]:
    """The table beside this file, by kind."""
    import tomllib

    return tomllib.loads(Path(__file__).with_name("first_party.toml").read_text(encoding="utf-8"))


def own_distributions() -> dict[str, str]:
    """The distributions that retrain consists of, and what each is for."""
    return _names()["distributions"]


def _by_distribution(kind: Kind) -> dict[str, list[str]]:
    return {name: names for name, names in _names().get(kind.value, {}).items() if name != DEFAULT}


def provider(kind: Kind, name: str) -> str | None:
    """The distribution of ours that provides this name, if any."""
    return next((distribution for distribution, names in _by_distribution(kind).items() if name in names), None)


def promised_names(kind: Kind) -> tuple[str, ...]:
    """All documented names of a kind."""
    return tuple(name for names in _by_distribution(kind).values() for name in names)


def promised_default(kind: Kind) -> str:
    """The default name for a key of this kind; empty when there is none.

    The distribution that owns the name supplies the default; this copy is for messages when that one is missing.
    """
    return str(_names().get(kind.value, {}).get(DEFAULT, ""))


def promised_options() -> dict[str, dict[str, Any]]:
    """By backend, the options that the documented full configuration holds at their defaults."""
    return _names()["options"]


def install_line(distribution: str, extra: str = "") -> str:
    """The command that installs a distribution here: by name, or from the clone that retrain-core was installed from.

    pip fetches a folder's requirements from its index, not from neighbouring folders, so a clone's line names them all.
    """
    suffix = f"[{extra}]" if extra else ""
    core = source_folder(CORE)
    clone = core.parent if core else None
    if clone is None or not (clone / distribution / "pyproject.toml").is_file():
        return f"pip install {shlex.quote(distribution + suffix)}"
    needed = (distribution + suffix, *_missing_siblings(clone / distribution))
    constraints = clone / "constraints.txt"
    options = f"-c {shlex.quote(str(constraints))} " if constraints.is_file() else ""
    return f"pip install {options}{shlex.join(str(clone / name) for name in needed)}"


def left_out(distribution: str) -> str:
    """What to change when `RETRAIN_PLUGINS` or `RETRAIN_BLOCK` leaves a needed distribution out."""
    return f"{distribution} is installed, but RETRAIN_PLUGINS or RETRAIN_BLOCK leaves it out: change that"


def _missing_siblings(folder: Path) -> list[str]:
    """Our own distributions that the one in `folder` requires and this environment lacks."""
    import tomllib  # only an error message needs it

    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = (line.partition("==")[0] for line in project["dependencies"] if line.startswith("retrain-"))
    return [name for name in names if not installed_version(name)]
