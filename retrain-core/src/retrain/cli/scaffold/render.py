"""The names of a new plugin, checked to be free, and its files from templates.

Templates are rendered in a temporary folder; only complete results are moved into place, in one step.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from retrain.kernel.config.toml_file import read_toml
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.dotted_path import candidate_files
from retrain.kernel.plugins.first_party import provider
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind
from retrain.kernel.version import __version__

CONFIGURATION = Path("retrain.toml")
MAX_CHARS = 40
SEARCHED = "plugins"  # the default of [plugins] search_paths: names below it need no prefix
PREFIX = "retrain_"  # of distributions only: retrain-entropy-floor registers `entropy_floor`
# Characters that end a TOML string, or that the templates would interpret.
UNSAFE = re.compile(r"[\"\\{}\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """`distribution` is the name for pip and of the folder, `module` the import, `part` the name in the TOML."""

    distribution: str
    module: str
    part: str


def names_from(text: str, *, where: str) -> Names:
    """Names built from the words of `text`; ConfigError when it is a path or yields no usable name."""

    def refuse(*, code: str, what: str, fix: str) -> ConfigError:
        return ConfigError(Problem(code=code, where=where, what=what, fix=fix))

    shown = ascii(text[:40])
    if not text.strip():
        raise refuse(code="plugin.name-empty", what="an empty name", fix="give one such as entropy-floor")
    if len(text) > MAX_CHARS:
        what, fix = f"{shown}... has {len(text)} characters", f"use at most {MAX_CHARS}"
        raise refuse(code="plugin.name-too-long", what=what, fix=fix)
    if re.search(r"[/\\]|^\.", text):
        what, fix = f"{shown} is a path, not a name", "give only the name, and the folder with --output-dir"
        raise refuse(code="plugin.name-is-path", what=what, fix=fix)
    # Accents are dropped; letters of other scripts are refused, since two of them may look alike.
    folded = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    if any(c.isalnum() and not c.isascii() for c in folded):
        what, fix = f"{shown} has letters that are not portable in module names", "use a-z, 0-9 and hyphens"
        raise refuse(code="plugin.name-not-ascii", what=what, fix=fix)
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", folded).lower())
    module = "_".join(words)
    part = module.removeprefix(PREFIX)
    for name in (module, part):
        if not name.isidentifier():
            what, fix = f"{shown} yields no name that Python can import", "begin with a letter: entropy-floor"
            raise refuse(code="plugin.name-not-importable", what=what, fix=fix)
        is_standard = name in sys.stdlib_module_names
        if keyword.iskeyword(name) or is_standard or name in ("retrain", "tests"):
            owner = "a module of the standard library" if is_standard else "taken"
            owner = "a Python keyword" if keyword.iskeyword(name) else f"{owner}: yours would shadow it"
            what, fix = f"{name!r} is {owner}", f"use another name, such as my-{name}"
            raise refuse(code="plugin.name-reserved", what=what, fix=fix)
    return Names(distribution="-".join(words), module=module, part=part)


def refuse_taken(
    names: Names, kind: Kind, plugins: Plugins, *, where: str, targets: Callable[[Names], Sequence[Path]]
) -> None:
    """ConfigError with a free name if a plugin, a module or one of the `targets` to be written has this one."""

    def clash(wanted: Names) -> tuple[str, str, str] | None:  # where, the owner, why
        for target in targets(wanted):
            if target.exists() or target.is_symlink():
                return str(target), "it exists already, and nothing was written", ""
        owners = " and ".join(str(entry.owner) for entry in plugins.find(kind, wanted.part))
        if owner := owners or provider(kind, wanted.part):
            return where, f"{owner} provides the {kind}", "two owners of one name are always an error"
        if module := _place_of(wanted.module):
            return where, f"as a module it is {module}", "one of the two would hide the other"
        return None

    if found := clash(names):
        own = names.distribution
        others = (names_from(f"my-{own}{end}", where=where) for end in ("", *(f"-{n}" for n in range(2, 100))))
        free = next(other for other in others if clash(other) is None)
        place, owner, why = found
        what, fix = f"the name {names.part!r} is taken: {owner}", f"use another name: {free.distribution} is free"
        raise ConfigError(Problem(code="plugin.name-taken", where=place, what=what, why=why, fix=fix))


def _place_of(module: str) -> str:
    """The file or folder that an import of `module` reads here or below a search path; empty if the name is free."""
    try:
        given = read_toml(CONFIGURATION)[0].get("plugins", {}).get("search_paths", [])
    # A file that is missing or faulty has no search paths; `retrain explain` reports its faults.
    except (ConfigError, AttributeError):
        given = []
    paths = [path for path in given if isinstance(path, str)] if isinstance(given, list) and given else [SEARCHED]
    # Python also imports a folder of modules without __init__.py, and `candidate_files` does not find it.
    folders = [Path(path, module) for path in ("", *paths)]
    for found in (*candidate_files(module, paths), *(folder for folder in folders if any(folder.glob("*.py")))):
        return str(found)
    try:
        spec = importlib.util.find_spec(module)
    # A module such as `__main__` has no spec.
    except (ImportError, ValueError):
        return ""
    return str(spec.origin or "") if spec else ""


def plain_text(text: str) -> str:
    """A name on one line, without characters that are not safe in TOML."""
    return " ".join(UNSAFE.sub(" ", text).split())


KINDS = (
    *(Kind.ADVANTAGE, Kind.TRANSFORM, Kind.UNCERTAINTY, Kind.REWARD, Kind.BACKEND, Kind.INFERENCE_ENGINE),
    *(Kind.DATA_SOURCE, Kind.ALGORITHM, Kind.PLANNING_DETECTOR, Kind.ENVIRONMENT, Kind.RECORDER, Kind.LAUNCHER),
    *(Kind.LOSS, Kind.RECIPE, Kind.SAMPLER),
)
SHORT = {"planning": Kind.PLANNING_DETECTOR, "data": Kind.DATA_SOURCE, "inference": Kind.INFERENCE_ENGINE}
IN_WHEEL = Path(__file__).parent / "templates"
# An editable install has no copy of the templates within the package.
IN_REPOSITORY = Path(__file__).parents[5] / "templates"


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
    what, fix = f"no kind of plugin is called {text!r}", f"use one of: {', '.join(map(slug, KINDS))}"
    fix = f"did you mean {near[0]!r}?" if near else fix
    raise ConfigError(Problem(code="plugin.unknown-kind", where="--kind", what=what, fix=fix))


def template(name: str) -> Path:
    """Folder of the cookiecutter template of a kind, or of `distribution`, shared by all kinds."""
    return (IN_WHEEL if IN_WHEEL.is_dir() else IN_REPOSITORY) / name


SHARED = "distribution"
README = "README.md"
TOML_BLOCK = re.compile(r"```toml\n(.*?)\n```", flags=re.DOTALL)


def render_kind(kind: Kind, names: Names, folder: Path, given: Mapping[str, str]) -> tuple[Path, dict[str, Any]]:
    """Render the kind's own files in `folder`; returns their folder and the variables used."""
    from cookiecutter.generate import generate_context
    from cookiecutter.prompt import prompt_for_config

    given_by_kind = generate_context(context_file=str(template(slug(kind)) / "cookiecutter.json"))["cookiecutter"]
    own = {"name": names.part, "distribution": names.distribution, "module": names.module}
    # A variable may use those before it, so our own come first; they come again, for the template has defaults of them.
    context = {"cookiecutter": {**own, **given_by_kind, **own, **given}}
    rendered = dict(prompt_for_config(context, no_input=True))
    return _generate(template(slug(kind)), rendered, folder), rendered


def render_distribution(kind: Kind, names: Names, folder: Path, *, author: str) -> tuple[Path, str]:
    """Render a whole distribution in `folder`; returns its folder and the TOML to paste from its README.

    The kind's files are copied over those that all kinds share, whose README and example include the kind's.
    """
    own, variables = render_kind(kind, names, folder / "kind", {"author": author, "form": SHARED})
    usage = (own / README).read_text(encoding="utf-8").strip()
    toml = toml_of(usage)
    major, minor, *_ = __version__.split(".")
    versions = {"core_from": __version__, "core_below": f"{major}.{int(minor) + 1}"}
    whole = _generate(template(SHARED), {**variables, **versions, "usage": usage, "toml": toml}, folder / SHARED)
    (own / README).unlink()
    shutil.copytree(own, whole, dirs_exist_ok=True)
    return whole, toml


@dataclass(frozen=True, slots=True, kw_only=True)
class OneFile:
    """The text of the module and of its test; `selected` is its name in the TOML, `toml` the tables to paste."""

    module: str
    test: str
    selected: str
    toml: str


def render_file(kind: Kind, names: Names, prefix: str) -> OneFile:
    """The plugin as one file, for a folder with the import prefix `prefix`, empty for the current folder."""
    path = f"{prefix}.{names.module}".removeprefix(".")
    with tempfile.TemporaryDirectory() as folder:
        made, variables = render_kind(kind, names, Path(folder), {"form": "file", "path": path})
        file, selected = str(variables["file"]), str(variables["selected"])
        named = selected.removeprefix(f"{SEARCHED}.")
        return OneFile(
            module=(made / "src" / names.module / f"{file}.py").read_text(encoding="utf-8"),
            test=(made / "tests" / f"test_{file}.py").read_text(encoding="utf-8"),
            selected=named,
            toml=toml_of((made / README).read_text(encoding="utf-8")).replace(f'"{selected}"', f'"{named}"'),
        )


def toml_of(readme: str) -> str:
    """The first TOML block in a README; it selects the part."""
    return str(TOML_BLOCK.findall(readme)[0])


@contextmanager
def scratch(place: Path) -> Iterator[Path]:
    """A temporary folder inside `place`, so that moving a result there is a single rename.

    `place` is created when missing, and removed again if it stays empty. ConfigError when it cannot be written.
    """
    missing = [folder for folder in (place, *place.parents) if not folder.exists()]
    try:
        try:
            place.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=".retrain-", dir=place))
        except OSError as error:
            what, fix = f"cannot be written: {error.strerror or error}", "choose another folder with --output-dir"
            raise ConfigError(Problem(code="plugin.unwritable", where=str(place), what=what, fix=fix)) from None
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        with suppress(OSError):  # not made, or not empty
            for each in missing:  # the innermost first
                each.rmdir()


def _generate(source: Path, variables: Mapping[str, Any], folder: Path) -> Path:
    # Not `cookiecutter.main`: it reads the user's defaults and keeps a replay file in the home folder.
    from cookiecutter.generate import generate_files

    made = generate_files(source, {"cookiecutter": dict(variables)}, output_dir=folder, accept_hooks=False)
    return Path(made)
