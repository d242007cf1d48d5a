"""One run of pytest with a mutant, in a process that was forked after the large libraries had been imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from tests.mutants.hook import VARIABLE, install


class Only:
    """A plugin that leaves out all tests but these; none named means all."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = names

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.names:
            items[:] = [item for item in items if item.nodeid in self.names]


def run_pytest(options: Sequence[str], names: Collection[str], mutated: Path, output: Path) -> None:
    """Run pytest in a process group of its own, which can be killed as a whole; exit as it does."""
    os.setsid()
    os.environ[VARIABLE] = str(mutated)  # for the processes that the tests start
    with output.open("w", encoding="utf-8") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    install()
    sys.exit(pytest.main(list(options), plugins=[Only(names)]))
