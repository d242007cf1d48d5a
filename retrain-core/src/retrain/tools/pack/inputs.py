"""The code, the data and the local models of a run as they go into a pack, without secrets in them.

A file is taken from the copy that the run kept, or from where it was read, if its hash is still the recorded one. Files
that are too large are left out, with hash and size. A value of the configuration that names a place outside the folder
of the run is replaced by one inside.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.kernel.errors import ConfigError, Problem
from retrain.records.files import new_digest
from retrain.records.identity.copies import FOLDER, copy_name
from retrain.records.identity.hashing import Budget, hash_file
from retrain.records.reading import read_regular
from retrain.text.secrets import HIDDEN, is_secret_name, known_forms
from retrain.tools.pack.archive import is_safe, refusal

OUTSIDE = "outside"
# Providers' keys, with their names in them, and private keys.
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


@dataclass(slots=True, kw_only=True)
class Inputs:
    """`members` by name, `placed` where each goes, `left_out` the files that a rerun must find or be given.

    Data files of up to `most_bytes` are packed; with `hide_secrets` files are packed without their secrets, and
    listed in `hidden`. `moved` are the replaced values of the configuration, `leaks` the lines that hold a secret.
    """

    most_bytes: int = 2**24
    hide_secrets: bool = False
    members: dict[str, bytes] = field(default_factory=dict)
    placed: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    moved: dict[str, str] = field(default_factory=dict)
    leaks: list[Leak] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)


def collect_inputs(
    identities: Mapping[str, Mapping[str, Any]], tables: Mapping[str, Any], *, most_bytes: int, hide_secrets: bool
) -> Inputs:
    """Return the files of all runs' identities, each once; ConfigError names files that changed since the run."""
    found = Inputs(most_bytes=most_bytes, hide_secrets=hide_secrets, moved=_moved(identities, tables))
    problems: list[Problem] = []
    seen: dict[tuple[str, str], str] = {}
    for folder, identity in identities.items():
        for kind in ("code", "data", "model"):
            section = identity.get(kind)
            files = section.get("files") if isinstance(section, dict) else None
            if files is None and isinstance(section, dict) and section.get("num_files"):
                what = f"{FOLDER}/files.json is missing or damaged, so its {kind} is unknown"
                fix = "run it again, then pack that run"
                problems.append(Problem(code="pack.inputs-unknown", where=folder, what=what, fix=fix))
            for name, file in (files or {}).items():
                before = seen.setdefault((kind, name), str(file.get("hash")))
                if before != str(file.get("hash")):
                    what, fix = f"{name} is not the same file in all runs of the campaign", "pack single runs"
                    problems.append(Problem(code="pack.runs-differ", where=folder, what=what, fix=fix))
                elif (kind, name) not in {(each["kind"], each["name"]) for each in (*found.placed, *found.left_out)}:
                    problem = _take(found, kind, name, file, identity)
                    problems += [problem] if problem else []
    if problems:
        raise ConfigError(*problems)
    return found


def _take(found: Inputs, kind: str, name: str, file: Mapping[str, Any], identity: Mapping[str, Any]) -> Problem | None:
    """Add a file, or return why a run could not be repeated without it."""
    place = _place(str(file.get("written", "")), found.moved)
    size, described = int(file.get("size", 0)), {"kind": kind, "name": name, "hash": file.get("hash", "")}
    if kind == "model" and not place:
        return None  # it comes with a distribution, or from a hub
    if why := refusal(kind, place) if is_safe(place) else "cannot be a file of a folder":
        what = f"{name} cannot be laid into another folder under this name: it {why}"
        fix = "name it by a path below the folder of the run, then run it again"
        return Problem(code="pack.unsafe-place", where=name, what=what, fix=fix)
    if kind != "code" and (size > found.most_bytes or file.get("is_sampled") or file.get("problem")):
        found.left_out.append({**described, "place": place, "size": size, "from": name})
        return None
    content = _content(kind, name, file, identity)
    if content is None:
        what, fix = "has changed since the run read it", "restore it, or run again and pack that run"
        return Problem(code="pack.file-changed", where=str(file.get("path") or name), what=what, fix=fix)
    if leaks := list(leaks_in(name, content)):
        if not found.hide_secrets or any(leak.line == 0 for leak in leaks):
            found.leaks += leaks
            return None
        content = hidden(content)
        found.hidden.append(name)
    # The identity of a rerun finds the packed copy under this name, to show a line that differs.
    member = f"{FOLDER}/{copy_name(kind, name if kind == 'model' else place)}"
    if not is_safe(member):
        member = f"{FOLDER}/{kind}-{len(found.placed)}"
    found.members[member] = content
    found.placed.append({**described, "place": place, "member": member, "size": len(content)})
    return None


def _content(kind: str, name: str, file: Mapping[str, Any], identity: Mapping[str, Any]) -> bytes | None:
    """Return the file as the run read it, from its copy or its place; None when neither has the recorded hash."""
    wanted, folder = file.get("hash"), identity.get(FOLDER)
    copy = Path(str(folder)) / copy_name(kind, name) if folder else None
    if copy is not None and copy.is_file():
        content = read_regular(copy)
        if new_digest(content).hexdigest() == wanted:
            return content
    for path in map(os.path.expanduser, file.get("places", ())):
        now = hash_file(name, path, Budget(), is_kept=False)
        if now.hash == wanted and not now.is_sampled:
            return read_regular(Path(path))
    return None


def _place(name: str, moved: Mapping[str, str]) -> str:
    """Return where a rerun lays a file: as the configuration names it; empty for a model that is named by no path."""
    for value, new in moved.items():
        if name == value or _is_below(name, value):
            return f"{new}{name[len(value) :]}"
    return name


def _moved(identities: Mapping[str, Mapping[str, Any]], tables: Mapping[str, Any]) -> dict[str, str]:
    """Return new values for the configured paths of files that are not below the run's folder."""
    names = [
        str(file.get("written", ""))
        for identity in identities.values()
        for kind in ("code", "data", "model")
        for file in ((identity.get(kind) or {}).get("files") or {}).values()
    ]
    values = sorted({text.rstrip("/") for _, text in texts_of(tables) if "/" in text and not is_safe(text.rstrip("/"))})
    used = [value for value in values if any(name == value or _is_below(name, value) for name in names)]
    return {value: f"{OUTSIDE}/{number}/{os.path.basename(value)}" for number, value in enumerate(used, start=1)}


def _is_below(name: str, folder: str) -> bool:
    return bool(folder) and name.startswith(f"{folder}/")


def texts_of(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield key and value of every text in a configuration, and of the switches that are on."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from texts_of(each, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for each in value:
            yield from texts_of(each, key)
    elif isinstance(value, str) and value:
        yield key, value
    elif value is True:
        yield key, "true"


def with_moved(value: Any, moved: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return moved.get(value.rstrip("/"), value)
    if isinstance(value, Mapping):
        return {name: with_moved(each, moved) for name, each in value.items()}
    return [with_moved(each, moved) for each in value] if isinstance(value, list) else value


# Keys, tokens and passwords in text to be published: file and line are named, never the secret.


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    file: str
    line: int
    what: str


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
    text = content.decode("utf-8", "surrogateescape")
    for form in known_forms():
        text = text.replace(form, HIDDEN)
    for pattern in (_SHAPE, _LOGIN):
        text = pattern.sub(lambda match: HIDDEN + "\n" * match[0].count("\n"), text)
    for pattern in (_ASSIGNED, _QUERY):
        text = pattern.sub(lambda m: m[0].replace(m["value"], HIDDEN) if _is_literal(m) else m[0], text)
    return text.encode("utf-8", "surrogateescape")


def _kind(line: str, forms: tuple[str, ...]) -> str:
    if any(form in line for form in forms):
        return "the value of a secret of this environment"
    if _SHAPE.search(line):
        return "text in the form of a key"
    if _LOGIN.search(line):
        return "a URL with a login"
    if any(_is_literal(match) for pattern in (_ASSIGNED, _QUERY) for match in pattern.finditer(line)):
        return "a key, token or password, written out"
    return ""


def _is_literal(match: re.Match[str]) -> bool:
    """True for a value that is written out: not a word without digits, a dotted name, or a hidden value."""
    found = match.groupdict()
    value, name = found["value"], found.get("name")
    if HIDDEN.strip("()") in value or not re.search(r"\d", value) or not re.search(r"[A-Za-z]", value):
        return False
    is_code = not found.get("quote") and re.fullmatch(r"[A-Za-z_][\w.]*", value) is not None and "." in value
    return (name is None or is_secret_name(name)) and not is_code
