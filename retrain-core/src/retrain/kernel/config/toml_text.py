"""Configuration values as TOML text, for messages and listings that users copy from, and values from free text."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any


def toml_text(value: Any) -> str:
    """A value as TOML: `true`, `"grpo"`, `[1, 2]`, `{ scale = "std" }`; None, which TOML lacks, is `(unset)`."""
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
    """The number or boolean, as TOML, that was put in quotes where `default` is one; empty when there is none."""
    if not isinstance(value, str) or not isinstance(default, int | float):
        return ""
    try:
        meant = tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):  # also of thousands of digits, or brackets
        return ""
    is_kind = isinstance(meant, bool) == isinstance(default, bool) and isinstance(meant, int | float)
    return value.strip() if is_kind else ""


def parse_free(text: str) -> Any:
    """A value for a free table: JSON if the text parses as JSON (number, true, list, object), else the text itself."""
    lowered = text.strip().lower()
    if lowered in ("nan", "inf", "-inf", "infinity", "-infinity"):
        return text
    try:
        return json.loads(lowered if lowered in ("true", "false") else text)
    except (ValueError, RecursionError):  # also of thousands of digits, or brackets
        pass
    try:
        return float(text) if any(c in text for c in ".eE") else text
    except ValueError:
        return text
