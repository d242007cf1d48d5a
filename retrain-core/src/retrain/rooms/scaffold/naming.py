"""Derives the names of distribution, module and part from what the user typed, and checks that they are free."""

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
PREFIX = "retrain_"  # of distributions only: retrain-entropy-floor registers `entropy_floor`
# Characters that end a TOML or Python string, or that the templates would interpret.
UNSAFE = re.compile(r"[\"\\{}\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """`distribution` is the name for pip and of the folder, `module` the import, `part` the name in the TOML."""

    distribution: str
    module: str
    part: str


def names_from(text: str, *, where: str) -> Names:
    """Names built from the words of `text`; ConfigError when it is a path or yields no usable name."""

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
        raise refuse(f"{shown} has letters that are not portable in module names", "use a-z, 0-9 and hyphens")
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", folded).lower())
    module = "_".join(words)
    part = module.removeprefix(PREFIX)
    for name in (module, part):
        if not name.isidentifier():
            raise refuse(f"{shown} yields no name that Python can import", "begin with a letter: entropy-floor")
        if keyword.iskeyword(name):
            raise refuse(f"{name!r} is a Python keyword", f"use another name, such as my-{name}")
        if name in sys.stdlib_module_names or name in ("retrain", "tests"):
            owner = "a module of the standard library" if name in sys.stdlib_module_names else "taken"
            raise refuse(f"{name!r} is {owner}: yours would shadow it", f"use another name, such as my-{name}")
    return Names(distribution="-".join(words), module=module, part=part)


def refuse_taken(names: Names, kind: Kind, plugins: Plugins, *, where: str) -> None:
    """ConfigError when another plugin registers the name for this kind, or a module with the name is installed."""
    owners = [str(entry.owner) for entry in plugins.find(kind, names.part)]
    promised = provider(kind, names.part)
    fix = f"use another name, such as my-{names.distribution}"
    if owners or promised:
        what = f"{kind} {names.part!r} exists already: {' and '.join(owners) or promised} provides it"
        why = "two owners of one name are an error in every configuration that uses it"
        raise ConfigError(Problem(where=where, what=what, why=why, fix=fix))
    try:
        found = importlib.util.find_spec(names.module)
    except (ImportError, ValueError):  # a module without a spec, such as __main__
        found = None
    if found is not None and found.origin is not None:
        what = f"a module {names.module!r} is installed already: {found.origin}"
        raise ConfigError(Problem(where=where, what=what, why="only one of the two could be imported", fix=fix))


def plain_text(text: str, *, where: str) -> str:
    """A description or an author that is safe in TOML and in a docstring; ConfigError when it is not."""
    found = UNSAFE.search(text)
    if found:
        what = f"the character {found.group()!a} is not allowed here"
        raise ConfigError(Problem(where=where, what=what, fix="leave it out; the files can be edited afterwards"))
    return " ".join(text.split())
