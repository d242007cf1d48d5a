"""The generated sections and their generators."""

from __future__ import annotations

from collections.abc import Callable

from retrain.cli.manual import markdown
from retrain.cli.manual.commands import commands
from retrain.cli.manual.contracts import checks, contract, hooks
from retrain.cli.manual.keys import annotated, flags, keys
from retrain.cli.manual.metrics import metrics
from retrain.cli.manual.parts import parts
from retrain.cli.manual.public import api
from retrain.cli.manual.scaffold import scaffold
from retrain.cli.manual.support import support
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.run.public_package import public_names

STATUS = {"renamed": "", "none": "no counterpart: "}


def public(plugins: Plugins) -> str:
    """Every name of the public package `retrain` that this one does not have, and what became of it."""
    rows = [(", ".join(map(markdown.code, names)), STATUS[status] + note) for names, status, note in public_names()]
    return markdown.table(("there", "here"), rows)


GENERATORS: dict[str, Callable[..., str]] = {
    "keys": keys,
    "flags": flags,
    "annotated": annotated,
    "commands": commands,
    "plugins": parts,
    "metrics": metrics,
    "hooks": hooks,
    "contract": contract,
    "checks": checks,
    "api": api,
    "scaffold": scaffold,
    "support": support,
    "public_names": public,
}


def generator(plugins: Plugins) -> Callable[[str], str]:
    """`generate("keys")` for the installed plugins: Markdown with headings from the third level on."""

    def generate(what: str) -> str:
        name, *arguments = what.split()
        if name not in GENERATORS:
            fix = f"use one of: {', '.join(GENERATORS)}"
            raise ConfigError(Problem(what=f"there is no generated section {name!r}", fix=fix))
        return GENERATORS[name](plugins, *arguments)

    return generate
