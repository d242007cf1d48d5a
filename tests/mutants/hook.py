"""Load a mutant in place of its module, in this process and in those that it starts.

`__main__.py` puts a copy of this file, and a `.pth` file that imports it, into site-packages while it runs. Variable
`RETRAIN_MUTANT` names a JSON file with the module and its source.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType

VARIABLE = "RETRAIN_MUTANT"


class _Loader(SourceFileLoader):
    mutated: str

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.mutated, self.path, "exec", dont_inherit=True)


class _Finder:
    def __init__(self, module: str, source: str) -> None:
        self.module, self.source = module, source

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        spec = PathFinder.find_spec(fullname, path)  # type: ignore[arg-type]
        if spec and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
            spec.loader.mutated = self.source
        return spec


def install() -> None:
    """Load the mutant that the variable names, if it names one."""
    if file := os.environ.get(VARIABLE):
        with open(file, encoding="utf-8") as stream:
            mutant = json.load(stream)
        sys.meta_path.insert(0, _Finder(mutant["module"], mutant["source"]))  # type: ignore[arg-type]


install()
