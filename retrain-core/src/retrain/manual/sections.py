"""The generated sections: which there are, and who makes each."""

from __future__ import annotations

from collections.abc import Callable

from retrain.errors import ConfigError, Problem
from retrain.manual.annotated import annotated
from retrain.manual.commands import commands
from retrain.manual.contracts import checks, contract, hooks
from retrain.manual.keys import flags, keys
from retrain.manual.metrics import metrics
from retrain.manual.parts import parts
from retrain.manual.public import api
from retrain.manual.scaffold import scaffold
from retrain.plugins.manager import Plugins

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
}


def generator(plugins: Plugins) -> Callable[[str], str]:
    """`generate("keys")`, for what is installed: Markdown with headings from the third level on."""

    def generate(what: str) -> str:
        name, *arguments = what.split()
        if name not in GENERATORS:
            fix = f"use one of: {', '.join(GENERATORS)}"
            raise ConfigError(Problem(what=f"nothing generates a section {name!r}", fix=fix))
        return GENERATORS[name](plugins, *arguments)

    return generate
