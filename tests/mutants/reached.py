"""Which tests run which line: measured once by coverage.py, in a run of the quick suite without a mutant."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from itertools import chain, islice, zip_longest
from pathlib import Path
from tempfile import NamedTemporaryFile

from coverage import CoverageData

ROOT = Path(__file__).parents[2]


def measure(file: Path, sources: Sequence[Path], *, options: Sequence[str]) -> None:
    """Run pytest with `options` and write to `file` which test ran which line of the sources.

    Exit if a test fails: it would notice every mutant. The file stays for when it has been mended.
    """
    included = "\n    ".join(str(each) for each in sources)
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "tests")
    with NamedTemporaryFile("w", suffix=".ini", encoding="utf-8") as settings:
        settings.write(f"[run]\ndata_file = {file}\ninclude =\n    {included}\n")
        settings.flush()
        covered = ("--cov", f"--cov-config={settings.name}", "--cov-context=test", "--cov-report=")
        if subprocess.run([*command, *covered], cwd=ROOT, check=False).returncode:
            sys.exit("the quick suite fails without a mutant: mend it first")


class Reached:
    """The tests that run a line in their own process."""

    def __init__(self, file: Path) -> None:
        self._data = CoverageData(str(file))
        self._data.read()
        self._contexts = cache(self._data.contexts_by_lineno)

    def tests(self, source: Path, line: int, *, folder: str, most: int) -> list[str]:
        """Return the tests that run a line: those below `folder`, then at most `most` others, taken from all files."""
        contexts = self._contexts(str(source)).get(line, [])
        names = sorted({each.rpartition("|")[0] for each in contexts} - {""})  # "": while tests were collected
        own = [name for name in names if name.startswith(f"{folder}/")]
        by_file: dict[str, list[str]] = {}
        for name in names:
            if not name.startswith(f"{folder}/"):
                by_file.setdefault(name.partition("::")[0], []).append(name)
        in_turn = (name for name in chain.from_iterable(zip_longest(*by_file.values())) if name)
        return [*own, *sorted(islice(in_turn, most))]
