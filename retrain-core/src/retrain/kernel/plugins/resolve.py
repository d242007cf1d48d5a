"""Resolves a name in the TOML to the object it denotes.

Order: registered name, `search_paths` prefix + dotted path, dotted path; two files for one dotted path are an error.
The message about a missing name gives the place that uses it, the nearest name, every name with its distribution, the
install line for a name of ours, and any entry point that failed to load, with its error.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.kernel.declared import Kind, PluginSpec
from retrain.kernel.errors import PluginError, Problem
from retrain.kernel.plugins.first_party import install_line, left_out, promised_default, promised_names, provider
from retrain.kernel.registry import Owner, Plugins, Registered

if TYPE_CHECKING:
    from pydantic import BaseModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A resolved name: the object, its owner, and the model of its parameters if it declared one."""

    name: str
    target: Any
    owner: Owner
    params: type[BaseModel] | None = None
    traits: object | None = None


def resolve(plugins: Plugins, kind: Kind, name: str, *, where: str, search_paths: Sequence[str] = ()) -> Found:
    """The object that `name` denotes, imported now; PluginError says why there is none. `where` names the key."""
    if problem := problem_with(plugins, kind, name, where=where, search_paths=search_paths):
        raise PluginError(problem)
    if entries := plugins.find(kind, name):
        return _loaded(entries[0], name, where)
    found = _from_dotted_path(name, kind, where, search_paths)
    if found is None:
        raise PluginError(missing(plugins, kind, name, where=where, search_paths=search_paths))
    return found


def problem_with(
    plugins: Plugins, kind: Kind, name: str, *, where: str, search_paths: Sequence[str] = ()
) -> Problem | None:
    """The problem that `resolve` would raise, found without importing the part itself; None when it looks fine."""
    entries = plugins.find(kind, name)
    if len(entries) > 1:
        owners = " and ".join(f"{entry.owner} ({entry.owner.source})" for entry in entries)
        fix = f"uninstall one, or leave one out with RETRAIN_BLOCK={entries[-1].owner.distribution}"
        return Problem(where=where, what=f"{kind} {name!r} is provided twice: by {owners}", fix=fix)
    if entries:
        return None
    if _is_dotted(name):
        two_files = ambiguity(f"{kind} {name!r}", _split(name)[0], where=where, search_paths=search_paths)
        if two_files or module_of(name, search_paths):
            return two_files
    return missing(plugins, kind, name, where=where, search_paths=search_paths)


def module_of(name: str, search_paths: Sequence[str]) -> str:
    """The module that a dotted path refers to, not imported; empty when there is none."""
    for candidate in candidate_modules(_split(name)[0], search_paths):
        try:
            if importlib.util.find_spec(candidate) is not None:
                return candidate
        except ModuleNotFoundError:
            continue
        except Exception:  # `resolve` reports its import error, with the cause
            return candidate
    return ""


def ambiguity(what: str, module: str, *, where: str, search_paths: Sequence[str] = ()) -> Problem | None:
    """The problem with `what` when its module could be either of two files; None when one file at most is found."""
    files = candidate_files(module, search_paths)
    if len(files) < 2:
        return None
    why, fix = "one file would silently hide the other", "rename or remove all but one, and name that one"
    return Problem(where=where, what=f"{what} could come from {' or '.join(map(str, files))}", why=why, fix=fix)


def missing(plugins: Plugins, kind: Kind, name: str, *, where: str, search_paths: Sequence[str] = ()) -> Problem:
    """The problem with a name that no plugin provides; an empty name stands for the default, if that is missing."""
    default = promised_default(kind)
    name = name or (default if not plugins.find(kind, default) else "")
    known = plugins.registered(kind)
    names = [entry.spec.name for entry in known]
    near = get_close_matches(name, [*names, *promised_names(kind)], n=1, cutoff=0.6)
    lines = [f"did you mean {near[0]!r}?"] if near and near[0] != name else []
    listed = ", ".join(f"{entry.spec.name} ({entry.owner})" for entry in known) or "none installed"
    lines.append(f"known {kind} names: {listed}")
    if _is_dotted(name):
        modules = ", ".join(candidate_modules(_split(name)[0], search_paths))
        lines.append(f"as a dotted path: no module found under {modules}")
    lines += [f"failed to load: {each.owner} ({each.owner.source}): {each.error}" for each in plugins.failures]
    what, fix = f"no {kind} named {name!r}", _fix(plugins, kind, name, near)
    return Problem(where=where, what=what, why="\n    ".join(lines), fix=fix)


def _fix(plugins: Plugins, kind: Kind, name: str, near: Sequence[str]) -> str:
    distribution = provider(kind, name) or (provider(kind, near[0]) if near else None)
    wanted = name if provider(kind, name) else (near[0] if near else name)
    if distribution is None or plugins.find(kind, wanted):
        return f"use {near[0]!r}" if near else "use a known name, or install the distribution that provides it"
    if distribution in plugins.left_out:
        return left_out(distribution)
    installed = {entry.owner.distribution for kind_ in Kind for entry in plugins.registered(kind_)}
    if distribution in installed:
        return f"{wanted!r} is documented but not built in this version of {distribution}; use another {kind}"
    return install_line(distribution)


def _loaded(entry: Registered, name: str, where: str) -> Found:
    spec, owner = entry.spec, entry.owner
    try:
        target, params = spec.load(), spec.load_params()
    except Exception as error:
        what = f"{entry.kind} {name!r} of {owner} failed to load: {type(error).__name__}: {error}"
        why, fix = f"it was announced as {spec.factory!r}", f"repair or reinstall {owner.distribution}"
        raise PluginError(Problem(where=where, what=what, why=why, fix=fix)) from error
    return Found(name=spec.name, target=target, owner=owner, params=params, traits=spec.traits)


def _from_dotted_path(name: str, kind: Kind, where: str, search_paths: Sequence[str]) -> Found | None:
    module_name, attribute = _split(name)
    for candidate in candidate_modules(module_name, search_paths):
        try:
            module = importlib.import_module(candidate)
        except Exception as error:
            absent = error.name if isinstance(error, ModuleNotFoundError) else None
            if absent is not None and f"{candidate}.".startswith(f"{absent}."):
                continue  # it is the candidate that is missing, not a module that the candidate imports
            what = f"{kind} {name!r}: importing {candidate} failed with {type(error).__name__}: {error}"
            fix = f"make `python -c 'import {candidate}'` work in this folder"
            raise PluginError(Problem(where=where, what=what, fix=fix)) from error
        if not hasattr(module, attribute):
            near = get_close_matches(attribute, [n for n in vars(module) if not n.startswith("_")], n=1)
            hint = f"did you mean {near[0]!r}?" if near else ""
            what = f"{kind} {name!r}: {getattr(module, '__file__', candidate)} has no {attribute!r}"
            raise PluginError(Problem(where=where, what=what, why=hint, fix="correct the name"))
        owner = Owner(distribution=getattr(module, "__file__", None) or candidate, source=candidate)
        target = getattr(module, attribute)
        if isinstance(target, PluginSpec):  # as a registration hook would get it, with parameters and traits
            return _loaded(Registered(kind=kind, spec=target, owner=owner), name, where)
        return Found(name=name, target=target, owner=owner)
    return None


def _is_dotted(name: str) -> bool:
    module, attribute = _split(name)
    return bool(attribute) and all(part.isidentifier() for part in (*module.split("."), attribute))


def _split(name: str) -> tuple[str, str]:
    module, _, attribute = name.replace(":", ".").rpartition(".")
    return module, attribute if module else ""


INSTALLED = ("site-packages", "dist-packages")


def candidate_modules(module: str, search_paths: Sequence[str]) -> list[str]:
    """The names under which a module is looked for: below each search path, then as given."""
    prefixes = [path.strip("./").replace("/", ".") for path in search_paths]
    return [*(f"{prefix}.{module}" for prefix in dict.fromkeys(prefixes) if prefix), module]


def candidate_files(module: str, search_paths: Sequence[str]) -> list[Path]:
    """The distinct files that could be `module`: all in the user's folders, and the first one that is installed.

    A module and a package of one name in one folder are two; one file that several paths reach is one. Folders behind
    the installed packages, where a resumed run finds copies of its code, only serve names that are nowhere else.
    """
    ends = [place for place, folder in enumerate(sys.path) if folder.endswith(INSTALLED)]
    library = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    starts = [place for place, folder in enumerate(sys.path) if folder in library or folder.endswith(INSTALLED)]
    start, end = starts[0] if starts else len(sys.path), ends[-1] + 1 if ends else len(sys.path)
    here = [""] if str(Path.cwd()) not in sys.path[end:] else []
    found: dict[Path, Path] = {}
    for name in candidate_modules(module, search_paths):
        installed = next(_files(name, sys.path[start:end]), None)
        for file in [*_files(name, [*here, *sys.path[:start]]), *([installed] if installed else [])]:
            found.setdefault(file.resolve(), file)
    return list(found.values())


def _files(module: str, folders: Iterable[str]) -> Iterator[Path]:
    *packages, name = module.split(".")
    for folder in folders:
        below = Path(folder, *packages)
        yield from (file for file in (below / name / "__init__.py", below / f"{name}.py") if file.is_file())
