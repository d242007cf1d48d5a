"""Derives the names of distribution, module and part from what the user typed, and checks that they are free."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from retrain.kernel.config.toml_file import read_toml
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.first_party import provider
from retrain.kernel.plugins.resolve import candidate_files
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind

CONFIGURATION = Path("retrain.toml")
MAX_CHARS = 40
SEARCHED = "plugins"  # the default of [plugins] search_paths: names below it need no prefix
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
        is_standard = name in sys.stdlib_module_names
        if keyword.iskeyword(name) or is_standard or name in ("retrain", "tests"):
            owner = "a Python keyword" if keyword.iskeyword(name) else "taken: yours would shadow it"
            owner = "a module of the standard library: yours would shadow it" if is_standard else owner
            raise refuse(f"{name!r} is {owner}", f"use another name, such as my-{name}")
    return Names(distribution="-".join(words), module=module, part=part)


def refuse_taken(
    names: Names, kind: Kind, plugins: Plugins, *, where: str, targets: Callable[[Names], Sequence[Path]]
) -> None:
    """ConfigError with a free name if a plugin, a module or one of the `targets` to be written has this one."""

    def clash(wanted: Names) -> tuple[str, str, str] | None:  # where, what, why
        for target in targets(wanted):
            if target.exists() or target.is_symlink():
                return str(target), "exists already; nothing was written", ""
        owners = " and ".join(str(entry.owner) for entry in plugins.find(kind, wanted.part))
        if owner := owners or provider(kind, wanted.part):
            what = f"{kind} {wanted.part!r} exists already: {owner} provides it"
            return where, what, "two owners of one name are always an error"
        if module := _place_of(wanted.module):
            what = f"the module name {wanted.module!r} is taken by {module}"
            return where, what, "one of the two would hide the other"
        return None

    if found := clash(names):
        own = names.distribution
        others = (names_from(f"my-{own}{end}", where=where) for end in ("", *(f"-{n}" for n in range(2, 100))))
        free = next(other for other in others if clash(other) is None)
        place, what, why = found
        raise ConfigError(
            Problem(where=place, what=what, why=why, fix=f"use another name: {free.distribution} is free")
        )


def _place_of(module: str) -> str:
    """The file or folder that an import of `module` reads here or below a search path; empty if the name is free."""
    paths = _search_paths()
    folders = [Path(path, module) for path in ("", *paths)]  # without __init__.py, but with modules
    for found in (*candidate_files(module, paths), *(folder for folder in folders if any(folder.glob("*.py")))):
        return str(found)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a module without a spec, such as __main__
        return ""
    return str(spec.origin or "") if spec else ""


def _search_paths() -> list[str]:
    """The search paths of the configuration in this folder, or the default ones."""
    try:
        given = read_toml(CONFIGURATION)[0].get("plugins", {}).get("search_paths", [])
    except (ConfigError, AttributeError):  # no file, or not a usable one: `retrain explain` reports it
        given = []
    return [path for path in given if isinstance(path, str)] if isinstance(given, list) and given else [SEARCHED]


def plain_text(text: str, *, where: str) -> str:
    """A description or an author that is safe in TOML and in a docstring; ConfigError when it is not."""
    found = UNSAFE.search(text)
    if found:
        what = f"the character {found.group()!a} is not allowed here"
        raise ConfigError(Problem(where=where, what=what, fix="leave it out; the files can be edited afterwards"))
    return " ".join(text.split())


KINDS = (
    *(Kind.ADVANTAGE, Kind.TRANSFORM, Kind.UNCERTAINTY, Kind.REWARD, Kind.BACKEND, Kind.INFERENCE_ENGINE),
    *(Kind.DATA_SOURCE, Kind.ALGORITHM, Kind.PLANNING_DETECTOR, Kind.ENVIRONMENT, Kind.RECORDER, Kind.LAUNCHER),
    *(Kind.LOSS, Kind.RECIPE, Kind.SAMPLER),
)
SHORT = {"planning": Kind.PLANNING_DETECTOR, "data": Kind.DATA_SOURCE, "inference": Kind.INFERENCE_ENGINE}
IN_WHEEL = Path(__file__).parent / "templates"
IN_REPOSITORY = Path(__file__).parents[5] / "templates"  # an editable install reads them from the repository


def slug(kind: Kind) -> str:
    """The kind as the command line and its template folder spell it: `data source` -> `data-source`."""
    return kind.value.replace(" ", "-")


def kind_of(text: str) -> Kind:
    """The kind that `--kind` names; ConfigError suggesting the nearest one otherwise."""
    wanted = text.strip().lower().replace("_", "-").replace(" ", "-")
    known = {slug(kind): kind for kind in KINDS} | SHORT
    if wanted in known:
        return known[wanted]
    near = get_close_matches(wanted, known, n=1)
    what, every = f"no kind of plugin is called {text!r}", f"use one of: {', '.join(map(slug, KINDS))}"
    raise ConfigError(Problem(where="--kind", what=what, fix=f"did you mean {near[0]!r}?" if near else every))


def template(name: str) -> Path:
    """Folder of the cookiecutter template of a kind, or of `distribution`, which all kinds share."""
    return (IN_WHEEL if IN_WHEEL.is_dir() else IN_REPOSITORY) / name
