"""Keeps keys, tokens, passwords and URL logins out of everything that is recorded or shown.

Configurations are hidden by the names of their keys (`hide`), messages by their form (`hide_text`). Everything that
leaves the process (records, pages, console) passes `redacted`. It knows the secret *values*: of the
environment's secret-looking variables, of `.env`, and of the configuration's secret keys.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

HIDDEN = "(hidden)"
# Hiding shorter values would hide ordinary words.
MIN_SECRET_CHARS = 8
# Tokens of a tokenizer (`eos_token`, `pad_token_id`) are markers, not secrets.
_NAME = (
    r"(?:api_?keys?|(?:access|private|signing)_?keys?|secret(?:_?key)?s?|password|passwd|credentials?"
    r"|(?!(?:pad|eos|bos|unk|sep|cls|mask)_)[a-z0-9]+_token|(?:auth|access|bearer|refresh)token)"
)
_SECRET_NAME = re.compile(rf"(?:^|_){_NAME}(?:$|_)|^token$", re.IGNORECASE)
# A letter after KEY or TOKEN makes another word: KEYBOARD, TOKENIZERS_PARALLELISM.
_SECRET_VARIABLE = re.compile(
    r"KEYS?(?![A-Z])|TOKENS?(?![A-Z])|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL", re.IGNORECASE
)
# Such a variable sets a key of the configuration: `RETRAIN__DATA__PROMPT_KEY` is no secret.
_CONFIG_VARIABLE = "RETRAIN__"
_NUMBER = re.compile(r"[-+.\d]+")
# No chat marker such as `stop_token = "<|im_end|>"`.
_LIKE_A_KEY = re.compile(r"(?=.*\d)[^\s<>]+")
_URL_LOGIN = re.compile(r"(?<=://)[^/\s?#\"'<>]+@")
_URL_QUERY = re.compile(rf"(?<=[?&])({_NAME}|token|key)=[^&\s]+", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"(?P<name>(?<![a-z0-9]){_NAME}[\"']?\s*[=:]\s*)(?P<value>\"[^\"]*\"|'[^']*'|[^\s\"',}}\]&]+)", re.IGNORECASE
)


def hide(value: Any, name: str = "") -> Any:
    """Plain data with its secrets replaced, recognised by key name, by URL form, or by values of the environment."""
    forms = known_forms()
    return _changed(value, lambda text, key: HIDDEN if is_secret_name(key) else _hide_known(text, forms), name)


def _changed(value: Any, change: Callable[[str, str], str], name: str = "") -> Any:
    """Plain data with `change(text, name of its key)` for every text that is not empty, names included."""
    if isinstance(value, str):
        return change(value, name) if value else value
    if isinstance(value, Mapping):
        return {_changed(key, change): _changed(item, change, str(key)) for key, item in value.items()}
    return [_changed(item, change, name) for item in value] if isinstance(value, list | tuple) else value


def is_secret_name(name: str) -> bool:
    """True if a value under this name is a secret: `api_key`, `hf_token`, ...

    `max_tokens` is not, nor is `api_key_env`, the name of the environment variable that holds a key.
    """
    plain = name.lstrip("-").replace("-", "_").replace(".", "_")
    return bool(_SECRET_NAME.search(plain)) and not plain.lower().endswith("_env")


def hide_text(text: str) -> str:
    """A message without URL logins, `api_key = ...`, and the values that `redacted` knows."""
    return _ASSIGNED.sub(rf"\g<name>{HIDDEN}", _hide_known(text, known_forms()))


def _hide_known(text: str, forms: Sequence[str]) -> str:
    """Hide only certain secrets; prose such as a system prompt must stay unchanged."""
    return _URL_QUERY.sub(rf"\1={HIDDEN}", _URL_LOGIN.sub("", _without(text, forms)))


class LearnedSecrets:
    """Secrets that no variable of this process holds: of `.env`, where a real variable wins, and of configurations."""

    def __init__(self) -> None:
        self.values: set[str] = set()

    def learn_environ(self, environ: Mapping[str, str | None]) -> None:
        self.values.update(_of_environ(environ))

    def learn_config(self, value: Any, name: str = "") -> None:
        """Add the values of secret keys in plain data, if they look like keys rather than words or markers."""
        if isinstance(value, Mapping):
            for key, item in value.items():
                self.learn_config(item, str(key))
        elif isinstance(value, list | tuple):
            for item in value:
                self.learn_config(item, name)
        elif isinstance(value, str) and is_secret_name(name) and _LIKE_A_KEY.fullmatch(value) and _is_secret(value):
            self.values.add(value)


LEARNED = LearnedSecrets()


def known_forms() -> tuple[str, ...]:
    """Every known secret in every form it may be written in, the longest first."""
    return _forms(frozenset({*_of_environ(os.environ), *LEARNED.values}))


def redacted(value: Any) -> Any:
    """Plain data or text, with the known secrets replaced in every string.

    Known are the values of the environment's secret-looking variables, and `LEARNED`. The longest is replaced first, so
    that no rest of it remains where it contains another one. A value that is short, a number, or the path of an
    existing file is no secret.
    """
    forms = known_forms()
    return _changed(value, lambda text, _: _without(text, forms)) if forms else value


def redacted_json(records: Iterable[Any], *, indent: int | None = None) -> list[str]:
    """Each record as JSON without known secrets; ValueError on NaN or infinity, unknown to JSON."""
    dump = partial(json.dumps, ensure_ascii=False, allow_nan=False, indent=indent)
    forms = known_forms()
    pairs = ((record, dump(record)) for record in records)
    # searching the text costs less than walking the record, and records rarely hold a secret
    return [dump(redacted(record)) if any(form in text for form in forms) else text for record, text in pairs]


def _without(text: str, forms: Sequence[str]) -> str:
    for form in forms:
        if form in text:
            text = text.replace(form, HIDDEN)
    return text


@lru_cache(maxsize=8)
def _forms(values: frozenset[str]) -> tuple[str, ...]:
    """Every secret as such, and inside JSON, HTML, a template of jinja2, a URL and Python's `repr`."""
    forms: set[str] = set()
    if values:  # rarely so in `retrain --help`, and that must start fast
        import html
        from urllib.parse import quote
    for value in values:
        in_html = html.escape(value)
        forms |= {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]}
        forms |= {in_html, in_html.replace("&quot;", "&#34;").replace("&#x27;", "&#39;"), quote(value, safe="")}
    return tuple(sorted(forms, key=lambda form: (-len(form), form)))


def _of_environ(environ: Mapping[str, str | None]) -> Iterator[str]:
    return (value for name, value in environ.items() if value and is_secret_variable(name) and _is_secret(value))


@lru_cache(maxsize=4096)
def is_secret_variable(name: str) -> bool:
    is_ours = name.upper().startswith(_CONFIG_VARIABLE)
    return is_secret_name(name.rpartition("__")[2]) if is_ours else bool(_SECRET_VARIABLE.search(name))


@lru_cache(maxsize=4096)
def _is_secret(value: str) -> bool:
    """True if a value may be hidden wherever it occurs: no ordinary short word, no number, no path of a file."""
    return len(value) >= MIN_SECRET_CHARS and not _NUMBER.fullmatch(value) and not os.path.exists(value)


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
