"""Renders the templates in a temporary folder; only complete results are moved into place, in one step."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from retrain.cli.scaffold.naming import SEARCHED, Names, slug, template
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import Kind
from retrain.kernel.version import __version__

SHARED = "distribution"
README = "README.md"
TOML_BLOCK = re.compile(r"```toml\n(.*?)\n```", flags=re.DOTALL)


def description_of(kind: Kind) -> str:
    """What the example of a kind does, in one sentence."""
    return str(_variables(kind)["description"])


def render_kind(kind: Kind, names: Names, folder: Path, given: Mapping[str, str]) -> tuple[Path, dict[str, Any]]:
    """Render the kind's own files in `folder`; returns their folder and the variables used."""
    from cookiecutter.prompt import prompt_for_config

    own = {"name": names.part, "distribution": names.distribution, "module": names.module}
    context = {"cookiecutter": {**own, **_variables(kind), **own, **given}}  # in this order, which rendering follows
    rendered = dict(prompt_for_config(context, no_input=True))
    return _generate(template(slug(kind)), rendered, folder), rendered


def render_distribution(kind: Kind, names: Names, folder: Path, given: Mapping[str, str]) -> tuple[Path, str]:
    """Render a whole distribution in `folder`; returns its folder and the TOML that its README tells users to paste.

    The kind's files are copied over those that all kinds share, whose README and example include the kind's.
    """
    own, variables = render_kind(kind, names, folder / "kind", {**given, "form": SHARED})
    usage = (own / README).read_text(encoding="utf-8").strip()
    toml = toml_of(usage)
    major, minor, *_ = __version__.split(".")
    versions = {"core_from": __version__, "core_below": f"{major}.{int(minor) + 1}", "year": str(date.today().year)}
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
    """The first TOML block in a README, which selects the part."""
    found = TOML_BLOCK.search(readme)
    if found is None:
        raise ValueError("the template's README has no block of TOML")
    return found.group(1)


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
            raise ConfigError(Problem(where=str(place), what=what, fix=fix)) from None
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        with suppress(OSError):  # not made, or not empty
            for each in missing:  # the innermost first
                each.rmdir()


def _variables(kind: Kind) -> dict[str, Any]:
    from cookiecutter.generate import generate_context

    context = generate_context(context_file=str(template(slug(kind)) / "cookiecutter.json"))
    return dict(context["cookiecutter"])


def _generate(source: Path, variables: Mapping[str, Any], folder: Path) -> Path:
    # Not `cookiecutter.main`, which reads the user's defaults and keeps a replay file in the home folder.
    from cookiecutter.generate import generate_files

    made = generate_files(source, {"cookiecutter": dict(variables)}, output_dir=folder, accept_hooks=False)
    return Path(made)
