"""One run of pytest with a mutant, in a process that was forked after the large libraries had been imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.mutants.hook import VARIABLE, install


def run_pytest(options: Sequence[str], mutated: Path, output: Path) -> None:
    """Run pytest in a process group of its own, which can be killed as a whole; exit as it does."""
    os.setsid()
    os.environ[VARIABLE] = str(mutated)  # for the processes that the tests start
    with output.open("w", encoding="utf-8") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    install()
    sys.exit(pytest.main(list(options)))
