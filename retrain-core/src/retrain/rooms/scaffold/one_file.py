"""The one-file form of a plugin: the example module of the kind's template and its test, without a distribution."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from retrain.kernel.types import Kind
from retrain.rooms.scaffold.naming import Names
from retrain.rooms.scaffold.render import README, render_kind, toml_of

SEARCHED = "plugins"  # the default of [plugins] search_paths: names below it need no prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class OneFile:
    """Text of the module and of its test; `selected` is its name in the TOML, `toml` the tables to paste."""

    module: str
    test: str
    selected: str
    toml: str


def one_file(kind: Kind, names: Names, prefix: str) -> OneFile:
    """The file for a folder with the import prefix `prefix`, empty for the current folder."""
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
