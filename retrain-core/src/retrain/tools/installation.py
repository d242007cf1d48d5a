"""Whether the installed files of retrain-core are its own; it imports only Python, for there may be nothing else left.

The public package `retrain` has the same import name: whichever is installed last replaces files of the other, and
uninstalling one removes what both have.
"""

import base64
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

OURS, PUBLIC = "retrain-core", "retrain"
SHOWN = 3  # files that a message names
REINSTALL = "pip install --force-reinstall --no-deps retrain-core (in a clone ./retrain-core)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """What was found: files that are not as they were installed, and the version of the public package, if any."""

    num_files: int
    public: str = ""
    replaced: Sequence[str] = ()
    missing: Sequence[str] = ()

    @property
    def is_whole(self) -> bool:
        """Whether every file is ours, and none will go with another package."""
        return not (self.public or self.replaced or self.missing)

    @property
    def detail(self) -> str:
        """What is wrong, in one sentence."""
        if self.is_whole:
            return f"{self.num_files} files of {OURS} as they were installed"
        damage = f"{_names(self.replaced)} of {OURS} replaced" if self.replaced else ""
        if self.missing:
            damage += f"{'; ' if damage else ''}{_names(self.missing)} missing"
        if not self.public:
            return f"files of {OURS} are not as they were installed: {damage}"
        same = f"the public package `retrain` {self.public}, another program of the same import name, is installed too"
        return f"{same}: {damage or 'uninstalling it will remove files of ' + OURS}"

    @property
    def fix(self) -> str:
        """The commands that repair it; empty if nothing is wrong."""
        first = "pip uninstall --yes retrain && " if self.public else ""
        return "" if self.is_whole else f"{first}{REINSTALL}"


def examine(path: Sequence[str] | None = None) -> Installation:
    """Compare the files of retrain-core with the record of its installation, below `path` (default: `sys.path`).

    An editable installation records no modules, so that nothing of it can be replaced.
    """
    found = {_name(each): each for each in reversed(list(distributions(path=list(path or sys.path))))}
    ours, public = found.get(OURS), found.get(PUBLIC)
    files = [(file, Path(str(file.locate()))) for file in (ours.files or () if ours else ()) if file.hash]
    here = [(file, place) for file, place in files if "dist-info" not in str(file)]
    return Installation(
        num_files=len(here),
        public=public.version if public else "",
        replaced=tuple(
            str(file) for file, place in here if place.is_file() and file.hash and file.hash.value != _sha256(place)
        ),
        missing=tuple(str(file) for file, place in here if not place.is_file()),
    )


def _name(distribution: Distribution) -> str:
    return str(distribution.metadata["Name"] or "").lower().replace("_", "-")


def _sha256(file: Path) -> str:
    """As a RECORD writes it."""
    return base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode()


def _names(files: Sequence[str]) -> str:
    more = f" and {len(files) - SHOWN} more" if len(files) > SHOWN else ""
    return ", ".join(sorted(files)[:SHOWN]) + more
