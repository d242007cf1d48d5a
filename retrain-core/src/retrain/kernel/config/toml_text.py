"""One value of a configuration as TOML writes it, for messages and listings that a person copies from."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any


def toml_text(value: Any) -> str:
    """`true`, `"grpo"`, `[1, 2]`, `{ scale = "std" }`; None, which TOML lacks, is `(unset)`."""
    if value is None:
        return "(unset)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {toml_text(one)}" for name, one in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def unquoted(value: Any, default: Any) -> str:
    """What a text says that was meant for a number or a boolean, as TOML; empty when it says no such thing."""
    if not isinstance(value, str) or not isinstance(default, int | float):
        return ""
    try:
        meant = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return ""
    is_kind = isinstance(meant, bool) == isinstance(default, bool) and isinstance(meant, int | float)
    return value.strip() if is_kind else ""
