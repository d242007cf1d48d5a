"""Resolves a name in the TOML to the object it denotes, and builds the part with its parameters.

Order: registered name, `search_paths` prefix + dotted path, dotted path; two files for one dotted path are an error.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.kernel.declared import Capabilities, EngineTraits, Kind, PluginSpec
from retrain.kernel.errors import LIBRARY_FOLDERS, ConfigError, PluginError, Problem, RetrainError
from retrain.kernel.registry import Owner, Plugins, Registered

if TYPE_CHECKING:  # `retrain --help` resolves commands, and must start fast
    from pydantic import BaseModel

    from retrain.kernel.config.resolved import Config
    from retrain.kernel.contracts.context import PluginContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    name: str
    target: Any
    owner: Owner
    params: type[BaseModel] | None = None
    traits: object | None = None


def resolve(plugins: Plugins, kind: Kind, name: str, *, where: str, search_paths: Sequence[str] = ()) -> Found:
    """Import and return the object that `name` denotes; PluginError gives the reason. `where` names the key."""
    if problem := problem_with(plugins, kind, name, where=where, search_paths=search_paths):
        raise PluginError(problem)
    if entries := plugins.find(kind, name):
        return _loaded(entries[0], name, where)
    found = _from_dotted_path(name, kind, where, search_paths)
    if found is None:
        raise PluginError(_missing(plugins, kind, name, where, search_paths))
    return found


def problem_with(
    plugins: Plugins, kind: Kind, name: str, *, where: str, search_paths: Sequence[str] = ()
) -> Problem | None:
    """The problem that `resolve` would raise, found without importing the part itself; None when it looks fine."""
    entries = plugins.find(kind, name)
    if len(entries) > 1:
        owners = " and ".join(f"{entry.owner} ({entry.owner.source})" for entry in entries)
        what = f"{kind} {name!r} is provided twice: by {owners}"
        fix = f"uninstall one, or leave one out with RETRAIN_BLOCK={entries[-1].owner.distribution}"
        return Problem(code="plugin.provided-twice", where=where, what=what, fix=fix)
    if entries:
        return None
    if _is_dotted(name):
        two_files = ambiguity(f"{kind} {name!r}", _split(name)[0], where=where, search_paths=search_paths)
        if two_files or module_of(name, search_paths):
            return two_files
    return _missing(plugins, kind, name, where, search_paths)


def _missing(plugins: Plugins, kind: Kind, name: str, where: str, search_paths: Sequence[str]) -> Problem:
    from retrain.kernel.plugins.missing import missing  # only a faulty configuration needs it

    tried = candidate_modules(_split(name)[0], search_paths) if _is_dotted(name) else ()
    return missing(plugins, kind, name, where=where, tried=tried)


def module_of(name: str, search_paths: Sequence[str]) -> str:
    """The module that a dotted path refers to, not imported; empty if it does not exist."""
    for candidate in candidate_modules(_split(name)[0], search_paths):
        try:
            if importlib.util.find_spec(candidate) is not None:
                return candidate
        # `find_spec` imports the parent packages of a dotted name, and they may not exist.
        except ModuleNotFoundError:
            continue
        # `resolve` imports it again and reports the error with its cause.
        except Exception:
            return candidate
    return ""


def ambiguity(what: str, module: str, *, where: str, search_paths: Sequence[str] = ()) -> Problem | None:
    """The problem with `what` when its module could be either of two files; None when one file at most is found."""
    files = candidate_files(module, search_paths)
    if len(files) < 2:
        return None
    what = f"{what} could come from {' or '.join(map(str, files))}"
    why, fix = "one file would silently hide the other", "rename or remove all but one, and name that one"
    return Problem(code="plugin.two-files", where=where, what=what, why=why, fix=fix)


def _loaded(entry: Registered, name: str, where: str) -> Found:
    spec, owner = entry.spec, entry.owner
    try:
        target, params = spec.load(), spec.load_params()
    except Exception as error:
        what = f"{entry.kind} {name!r} of {owner} failed to load: {type(error).__name__}: {error}"
        why, fix = f"it was announced as {spec.factory!r}", f"repair or reinstall {owner.distribution}"
        raise PluginError(Problem(code="plugin.load-failed", where=where, what=what, why=why, fix=fix)) from error
    return Found(name=spec.name, target=target, owner=owner, params=params, traits=spec.traits)


def _from_dotted_path(name: str, kind: Kind, where: str, search_paths: Sequence[str]) -> Found | None:
    module_name, attribute = _split(name)
    for candidate in candidate_modules(module_name, search_paths):
        try:
            module = importlib.import_module(candidate)
        except Exception as error:
            absent = error.name if isinstance(error, ModuleNotFoundError) else None
            # The candidate itself is missing, not a module that it imports.
            if absent is not None and f"{candidate}.".startswith(f"{absent}."):
                continue
            what = f"{kind} {name!r}: importing {candidate} failed with {type(error).__name__}: {error}"
            fix = f"make `python -c 'import {candidate}'` work in this folder"
            raise PluginError(Problem(code="plugin.import-failed", where=where, what=what, fix=fix)) from error
        if not hasattr(module, attribute):
            near = get_close_matches(attribute, [n for n in vars(module) if not n.startswith("_")], n=1)
            what = f"{kind} {name!r}: {getattr(module, '__file__', candidate)} has no {attribute!r}"
            fix = f"did you mean {near[0]!r}?" if near else "correct the name"
            raise PluginError(Problem(code="plugin.no-such-name", where=where, what=what, fix=fix))
        owner = Owner(distribution=getattr(module, "__file__", None) or candidate, source=candidate)
        target = getattr(module, attribute)
        # Handled as if registered by a hook, so that its parameters and traits count.
        if isinstance(target, PluginSpec):
            return _loaded(Registered(kind=kind, spec=target, owner=owner), name, where)
        return Found(name=name, target=target, owner=owner)
    return None


def _is_dotted(name: str) -> bool:
    module, attribute = _split(name)
    return bool(attribute) and all(part.isidentifier() for part in (*module.split("."), attribute))


def _split(name: str) -> tuple[str, str]:
    # `module:attribute`, the form of entry points, is accepted as well.
    module, _, attribute = name.replace(":", ".").rpartition(".")
    return module, attribute if module else ""


def candidate_modules(module: str, search_paths: Sequence[str]) -> list[str]:
    """The names under which a module is looked for: below each search path, then as given."""
    prefixes = [path.strip("./").replace("/", ".") for path in search_paths]
    return [*(f"{prefix}.{module}" for prefix in dict.fromkeys(prefixes) if prefix), module]


def candidate_files(module: str, search_paths: Sequence[str]) -> list[Path]:
    """The distinct files that could be `module`: all in the user's folders, and the first one that is installed.

    A module and a package of one name in one folder are two; one file that several paths reach is one. Folders behind
    the installed packages, where a resumed run finds copies of its code, only serve names that are nowhere else.
    """
    # The library is one stretch of `sys.path`, from the standard library to the last folder of installed packages.
    installed_in = tuple(LIBRARY_FOLDERS)
    ends = [place for place, folder in enumerate(sys.path) if folder.endswith(installed_in)]
    library = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    starts = [place for place, folder in enumerate(sys.path) if folder in library or folder.endswith(installed_in)]
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


def build_part(
    kind: Kind,
    name: str,
    path: str,
    context: PluginContext,
    options: Mapping[str, Any] | None = None,
    options_path: str = "",
    given: Sequence[Any] = (),
) -> Any:
    """Return the product of the factory of `name`; an unexpected exception becomes a PluginError naming the plugin.

    `path` and `options_path` are the keys (`table.key`) that name the part and its options, for messages; `given` are
    further arguments of factories of this kind.
    """
    config = context.config
    where = config.place(path)
    found = resolve(context.plugins, kind, name, where=where, search_paths=config.plugins.search_paths)
    params, problems = validated_params(found.params, options or {}, where=config.place(options_path))
    if problems:
        raise ConfigError(*problems)
    try:
        return found.target(replace(context, params=params), *given)
    except RetrainError:
        raise
    except Exception as error:
        what = f"{kind} {name!r} of {found.owner} could not be built: {type(error).__name__}: {error}"
        fix = f"repair the plugin in {found.owner.distribution}, or choose another {kind}"
        raise PluginError(Problem(code="plugin.build-failed", where=where, what=what, fix=fix)) from error


def validated_params(
    model: type[BaseModel] | None, given: Mapping[str, Any], *, where: str
) -> tuple[BaseModel | None, list[Problem]]:
    """The parameters as the plugin's model, or every problem with them; without a model, None for any parameters."""
    if model is None:
        return None, []
    from pydantic import ValidationError

    try:
        return model.model_validate(dict(given)), []
    except ValidationError as error:
        return None, [_problem(detail, model, where) for detail in error.errors()]


def _problem(detail: Any, model: type[BaseModel], where: str) -> Problem:
    name = ".".join(str(part) for part in detail["loc"])
    if detail["type"] != "extra_forbidden":
        what = f"invalid option: {detail['msg'].removeprefix('Value error, ')}"
        return Problem(code="plugin.bad-option", where=f"{where}.{name}", what=what, fix="correct the value")
    near, known = get_close_matches(name, model.model_fields, n=1), ", ".join(model.model_fields) or "none"
    what, fix = f"unknown option {name!r}", f"use {near[0]!r}" if near else f"known: {known}"
    return Problem(code="plugin.unknown-option", where=where, what=what, fix=fix)


def declared_capabilities(config: Config, plugins: Plugins) -> Capabilities | None:
    """Capabilities of the configured backend with the configured engine, importing neither; None = unknown."""
    capabilities = plugins.traits_of(Kind.BACKEND, config.backend.backend, Capabilities)
    traits = plugins.traits_of(Kind.INFERENCE_ENGINE, config.inference.engine, EngineTraits)
    return traits.limit(capabilities) if capabilities and traits else capabilities
