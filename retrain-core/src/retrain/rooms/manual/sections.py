"""The generated sections and their generators."""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.manager import Plugins
from retrain.rooms.manual.commands import commands
from retrain.rooms.manual.contracts import checks, contract, hooks
from retrain.rooms.manual.keys import annotated, flags, keys
from retrain.rooms.manual.metrics import metrics
from retrain.rooms.manual.parts import parts
from retrain.rooms.manual.public import api
from retrain.rooms.manual.scaffold import scaffold
from retrain.rooms.manual.support import support

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
