"""The names that our own distributions provide, for the install line in the message about a missing one.

`first_party.toml` lists every name that the documentation mentions, and the defaults that those distributions supply.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from retrain.kernel.declared import Kind

CORE = "retrain-core"
DEFAULT = "default"  # key of a kind's default in the table


@cache
def _names() -> dict[str, dict[str, Any]]:
    import tomllib

    return tomllib.loads(Path(__file__).with_name("first_party.toml").read_text(encoding="utf-8"))


def own_distributions() -> dict[str, str]:
    """Purpose of each distribution that retrain consists of."""
    return _names()["distributions"]


def _by_distribution(kind: Kind) -> dict[str, list[str]]:
    return {name: names for name, names in _names().get(kind.value, {}).items() if name != DEFAULT}


def provider(kind: Kind, name: str) -> str | None:
    """The first-party distribution that provides this name, if any."""
    return next((distribution for distribution, names in _by_distribution(kind).items() if name in names), None)


def promised_names(kind: Kind) -> tuple[str, ...]:
    return tuple(name for names in _by_distribution(kind).values() for name in names)


def promised_default(kind: Kind) -> str:
    """The default name for a key of this kind, if any.

    The distribution that owns the name supplies the default; this copy is for messages when that one is missing.
    """
    return str(_names().get(kind.value, {}).get(DEFAULT, ""))


def promised_options() -> dict[str, dict[str, Any]]:
    """Return by backend the options that the documented full configuration holds at their defaults."""
    return _names()["options"]
