"""Compares the files of retrain-core with its installation; imports only Python, since nothing else may be left.

The public package `retrain` has the same import name: whichever is installed last replaces files of the other, and
uninstalling one removes what both have.
"""

import base64
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

OURS, PUBLIC = "retrain-core", "retrain"
SHOWN = 3  # files that a message names
REINSTALL = "pip install --force-reinstall --no-deps retrain-core (in a clone ./retrain-core)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """Files that differ from those installed, and the version of the public package, if any."""

    num_files: int
    public: str = ""
    replaced: Sequence[str] = ()
    missing: Sequence[str] = ()

    @property
    def is_whole(self) -> bool:
        return not (self.public or self.replaced or self.missing)

    @property
    def detail(self) -> str:
        if self.is_whole:
            return f"{self.num_files} files of {OURS}, unchanged"
        damage = f"{_names(self.replaced)} of {OURS} replaced" if self.replaced else ""
        if self.missing:
            damage += f"{'; ' if damage else ''}{_names(self.missing)} missing"
        if not self.public:
            return f"files of {OURS} have changed since it was installed: {damage}"
        same = f"the public package `retrain` {self.public}, another program of the same import name, is installed too"
        return f"{same}: {damage or 'uninstalling it will remove files of ' + OURS}"

    @property
    def fix(self) -> str:
        first = "pip uninstall --yes retrain && " if self.public else ""
        return "" if self.is_whole else f"{first}{REINSTALL}"


def examine(path: Sequence[str] | None = None) -> Installation:
    """Compare the files of retrain-core with the record of its installation, below `path` (default: `sys.path`).

    An editable installation records no modules, so that nothing of it can be replaced.
    """
    # Reversed, so that the first of a name wins, as it does for an import.
    installed = reversed(list(distributions(path=list(path or sys.path))))
    found = {str(each.metadata["Name"] or "").lower().replace("_", "-"): each for each in installed}
    ours, public = found.get(OURS), found.get(PUBLIC)
    files = [(file, Path(str(file.locate()))) for file in (ours.files or () if ours else ()) if file.hash]
    here = [(file, place) for file, place in files if "dist-info" not in str(file)]
    replaced, missing = list[str](), list[str]()
    for file, place in here:
        if not place.is_file():
            missing.append(str(file))
        elif file.hash:
            digest = base64.urlsafe_b64encode(hashlib.sha256(place.read_bytes()).digest()).rstrip(b"=").decode()
            replaced += [] if digest == file.hash.value else [str(file)]
    version = public.version if public else ""
    return Installation(num_files=len(here), public=version, replaced=tuple(replaced), missing=tuple(missing))


def _names(files: Sequence[str]) -> str:
    more = f" and {len(files) - SHOWN} more" if len(files) > SHOWN else ""
    return ", ".join(sorted(files)[:SHOWN]) + more
