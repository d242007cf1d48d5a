"""Finds keys, tokens and passwords in text to be published; names file and line, never the secret."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from retrain.text.secrets import HIDDEN, is_secret_name, known_forms

# The forms of providers' keys, which carry their name, and of private keys.
_SHAPES = (
    r"(?:sk|rk|pk)-(?:proj-|ant-|live-|test-)?[A-Za-z0-9_-]{20,}",
    r"hf_[A-Za-z0-9]{20,}",
    r"gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,}",
    r"(?:AKIA|ASIA)[A-Z0-9]{16}",
    r"xox[abprs]-[A-Za-z0-9-]{10,}",
    r"AIza[A-Za-z0-9_-]{30,}",
    r"glpat-[A-Za-z0-9_-]{18,}",
    r"eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*",
)
_SHAPE = re.compile("|".join(rf"(?<![A-Za-z0-9_-])(?:{shape})" for shape in _SHAPES))
_LOGIN = re.compile(r"(?<=://)[^/\s:@?#\"'<>{}$]+:[^/\s@?#\"'<>{}$]+(?=@)")
# `api_key = "..."`, `"hf_token": "..."`, `API_KEY=...`: a literal with a digit, not a name, a call or an example
_ASSIGNED = re.compile(
    r"(?P<name>[A-Za-z_][\w-]*)[\"']?\s*(?::\s*str\s*)?[:=]\s*(?P<quote>[\"']?)(?P<value>[^\s\"'()\[\]{},;&<>$]{8,})(?P=quote)"
)
_QUERY = re.compile(r"(?<=[?&])(?:api_?key|key|token|access_token)=(?P<value>[^&\s\"'{}$<>]{8,})", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


def leaks_in(name: str, content: bytes) -> Iterator[Leak]:
    """Yield every line with a secret; a binary file is searched only for the known values, and its line is 0."""
    forms = known_forms()
    if b"\0" in content:
        if any(form.encode() in content for form in forms):
            yield Leak(file=name, line=0, what="the value of a secret of this environment")
        return
    for number, line in enumerate(content.decode("utf-8", "replace").split("\n"), start=1):
        if what := _kind(line, forms):
            yield Leak(file=name, line=number, what=what)


def hidden(content: bytes) -> bytes:
    """Return a text without its secrets, with the same number of lines."""
    text = content.decode("utf-8", "surrogateescape")
    for form in known_forms():
        text = text.replace(form, HIDDEN)
    for pattern in (_SHAPE, _LOGIN):
        text = pattern.sub(lambda match: HIDDEN + "\n" * match[0].count("\n"), text)
    for pattern in (_ASSIGNED, _QUERY):
        text = pattern.sub(_without_value, text)
    return text.encode("utf-8", "surrogateescape")


def _kind(line: str, forms: tuple[str, ...]) -> str:
    if any(form in line for form in forms):
        return "the value of a secret of this environment"
    if _SHAPE.search(line):
        return "has the form of a key"
    if _LOGIN.search(line):
        return "a URL with a login"
    if any(_is_literal(match) for pattern in (_ASSIGNED, _QUERY) for match in pattern.finditer(line)):
        return "a key, token or password is written out"
    return ""


def _is_literal(match: re.Match[str]) -> bool:
    """True for a value that is written out: not a word without digits, a dotted name, or a hidden value."""
    found = match.groupdict()
    value, name = found["value"], found.get("name")
    if HIDDEN.strip("()") in value or not re.search(r"\d", value) or not re.search(r"[A-Za-z]", value):
        return False
    is_code = not found.get("quote") and re.fullmatch(r"[A-Za-z_][\w.]*", value) is not None and "." in value
    return (name is None or is_secret_name(name)) and not is_code


def _without_value(match: re.Match[str]) -> str:
    return match[0].replace(match["value"], HIDDEN) if _is_literal(match) else match[0]
