"""From the name that a user types to the names of distribution, module and part, free and usable."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
import unicodedata
from dataclasses import dataclass

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.first_party import provider
from retrain.kernel.plugins.manager import Plugins
from retrain.kernel.types import Kind

MAX_CHARS = 40
PREFIX = "retrain_"  # of the distribution, not of the name in the TOML: retrain-entropy-floor offers `entropy_floor`
# What would end a string of TOML or Python, or be read by the templates.
UNSAFE = re.compile(r"[\"\\{}\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """`distribution` is what pip installs (and its folder), `module` what Python imports, `part` what the TOML says."""

    distribution: str
    module: str
    part: str


def names_from(text: str, *, where: str) -> Names:
    """Names made of the words of `text`; ConfigError when it is a path, or no usable name is in it."""

    def refuse(what: str, fix: str) -> ConfigError:
        return ConfigError(Problem(where=where, what=what, fix=fix))

    shown = ascii(text[:40])
    if not text.strip():
        raise refuse("an empty name", "give one such as entropy-floor")
    if len(text) > MAX_CHARS:
        raise refuse(f"{shown}... has {len(text)} characters", f"use at most {MAX_CHARS}")
    if re.search(r"[/\\]|^\.", text):
        raise refuse(f"{shown} is a path, not a name", "give the name alone, and the folder with --output-dir")
    folded = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    if any(c.isalnum() and not c.isascii() for c in folded):
        raise refuse(f"{shown} has letters that no module may have everywhere", "use a-z, 0-9 and hyphens")
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", folded).lower())
    module = "_".join(words)
    part = module.removeprefix(PREFIX)
    for name in (module, part):
        if not name.isidentifier():
            raise refuse(f"{shown} gives no name that Python can import", "begin with a letter: entropy-floor")
        if keyword.iskeyword(name):
            raise refuse(f"{name!r} is a keyword of Python", f"use another name, such as my-{name}")
        if name in sys.stdlib_module_names or name in ("retrain", "tests"):
            owner = "a module of Python itself" if name in sys.stdlib_module_names else "taken"
            raise refuse(f"{name!r} is {owner}: yours would hide it", f"use another name, such as my-{name}")
    return Names(distribution="-".join(words), module=module, part=part)


def refuse_taken(names: Names, kind: Kind, plugins: Plugins, *, where: str) -> None:
    """ConfigError when a plugin registers that name for that kind already, or a module of that name is installed."""
    owners = [str(entry.owner) for entry in plugins.find(kind, names.part)]
    promised = provider(kind, names.part)
    fix = f"use another name, such as my-{names.distribution}"
    if owners or promised:
        what = f"{kind} {names.part!r} exists already: {' and '.join(owners) or promised} provides it"
        why = "two owners of one name are an error as soon as a configuration asks for it"
        raise ConfigError(Problem(where=where, what=what, why=why, fix=fix))
    try:
        found = importlib.util.find_spec(names.module)
    except (ImportError, ValueError):  # a module without a spec: it exists, and says no more
        found = None
    if found is not None and found.origin is not None:
        what = f"a module {names.module!r} is installed already: {found.origin}"
        raise ConfigError(Problem(where=where, what=what, why="only one of the two could be imported", fix=fix))


def plain_text(text: str, *, where: str) -> str:
    """A description or an author as it may stand in TOML and in a docstring; ConfigError when it may not."""
    found = UNSAFE.search(text)
    if found:
        what = f"the character {found.group()!a} cannot stand there"
        raise ConfigError(Problem(where=where, what=what, fix="leave it out; the files can be edited afterwards"))
    return " ".join(text.split())
