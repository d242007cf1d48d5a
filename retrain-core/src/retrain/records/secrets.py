"""Keeps keys, tokens, passwords and URL logins out of everything that is written down or shown."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "(hidden)"
MIN_SECRET_CHARS = 8  # shorter values of secret-looking variables would blot out ordinary words
_NAME = r"(?:api_?key|(?:auth|access|hf|bearer|refresh)_token|secret(?:_key)?|password|passwd|credentials?)"
_SECRET_NAME = re.compile(rf"(?:^|_){_NAME}(?:$|_)|^token$", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@]+@")
_URL_QUERY = re.compile(rf"(?<=[?&])({_NAME}|token|key)=[^&\s]+", re.IGNORECASE)


def hide(value: Any, name: str = "") -> Any:
    """Plain data with its secrets replaced: by name of the key, form of a URL, values of the environment."""
    if isinstance(value, Mapping):
        return {key: hide(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [hide(item) for item in value]
    if isinstance(value, str) and value and is_secret_name(name):
        return HIDDEN
    return hide_text(value) if isinstance(value, str) else value


def is_secret_name(name: str) -> bool:
    """Whether a value under this name is a secret (`api_key`, `hf_token`, ...; `max_tokens` is not)."""
    return bool(_SECRET_NAME.search(name.lstrip("-").replace("-", "_").replace(".", "_")))


def hide_text(text: str) -> str:
    """Text without URL logins, and without the value of any secret-looking environment variable."""
    for name, value in os.environ.items():
        if len(value) >= MIN_SECRET_CHARS and _SECRET_VARIABLE.search(name) and value in text:
            text = text.replace(value, HIDDEN)
    return _URL_QUERY.sub(rf"\1={HIDDEN}", _URL_LOGIN.sub("", text))


def hide_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line with its secrets replaced, in both forms `--x-api-key v` and `name=value`."""
    shown: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if shown and is_secret_name(shown[-1]) and not argument.startswith("--"):
            shown.append(HIDDEN)
        elif equals and value and is_secret_name(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(hide_text(argument))
    return shown
