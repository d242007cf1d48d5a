"""Keeps keys, tokens, passwords and URL logins out of everything that is recorded or shown."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "(hidden)"
MIN_SECRET_CHARS = 8  # hiding shorter values of secret-looking variables would hide ordinary words
_NAME = (
    r"(?:api_?keys?|(?:access|private|signing)_?keys?|secret(?:_?key)?s?|password|passwd|credentials?"
    r"|(?!(?:pad|eos|bos|unk|sep|cls|mask)_)[a-z0-9]+_token|(?:auth|access|bearer|refresh)token)"
)
_SECRET_NAME = re.compile(rf"(?:^|_){_NAME}(?:$|_)|^token$", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s?#\"'<>]+@")
_URL_QUERY = re.compile(rf"(?<=[?&])({_NAME}|token|key)=[^&\s]+", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"(?P<name>(?<![a-z0-9]){_NAME}[\"']?\s*[=:]\s*)(?P<value>\"[^\"]*\"|'[^']*'|[^\s\"',}}\]&]+)", re.IGNORECASE
)


def hide(value: Any, name: str = "") -> Any:
    """Plain data with its secrets replaced, recognised by key name, by URL form, or by values of the environment."""
    if isinstance(value, Mapping):
        return {key: hide(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [hide(item, name) for item in value]
    if isinstance(value, str) and value and is_secret_name(name):
        return HIDDEN
    return _hide_known(value) if isinstance(value, str) else value


def is_secret_name(name: str) -> bool:
    """Whether a value under this name is a secret: `api_key`, `hf_token`, ...

    `max_tokens` is not, nor is `api_key_env`, which names the environment variable that holds a key.
    """
    plain = name.lstrip("-").replace("-", "_").replace(".", "_")
    return bool(_SECRET_NAME.search(plain)) and not plain.lower().endswith("_env")


def hide_text(text: str) -> str:
    """A message without URL logins, `api_key = ...`, and the value of any secret-looking environment variable."""
    return _ASSIGNED.sub(rf"\g<name>{HIDDEN}", _hide_known(text))


def _hide_known(text: str) -> str:
    """Hide only certain secrets; prose such as a system prompt must stay unchanged."""
    for name, value in os.environ.items():
        if len(value) >= MIN_SECRET_CHARS and _SECRET_VARIABLE.search(name) and value in text:
            text = text.replace(value, HIDDEN)
    return _URL_QUERY.sub(rf"\1={HIDDEN}", _URL_LOGIN.sub("", text))


def hide_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line with its secrets replaced, in every form: `--x-api-key v`, `name=value`, `--set=name=value`."""
    shown: list[str] = []
    for argument in arguments:
        head, equals, value = argument.rpartition("=")
        if shown and is_secret_name(shown[-1]) and not argument.startswith("--"):
            shown.append(HIDDEN)
        elif equals and value and is_secret_name(head.rpartition("=")[2]):
            shown.append(f"{head}={HIDDEN}")
        else:
            shown.append(hide_text(argument))
    return shown
