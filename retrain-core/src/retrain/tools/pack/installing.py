"""Makes the virtual environment of a rerun from wheels alone, each of which the listing named with its hash.

Requirements in metadata are not followed, nothing is built, and pip installs files of known SHA-256 without an index:
the pack's wheels, and those that the user's pip downloaded for the listed versions.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

from retrain.kernel.errors import BackendError, ConfigError, Problem
from retrain.text.terminal_text import printable
from retrain.tools.pack.archive import METADATA, refused
from retrain.tools.pack.contents import Contents
from retrain.tools.pack.packages import digest_of, pinned
from retrain.tools.pack.wheels import CheckedWheel, ReadWheel, read_wheel

Say = Callable[[str], None]
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def make_environment(
    contents: Contents,
    wheels: Sequence[CheckedWheel],
    unpacked: Path,
    folder: Path,
    environ: Mapping[str, str],
    say: Say,
    *,
    other_builds: bool,
) -> Path:
    """Make a virtual environment with the pack's wheels and the recorded packages; return its interpreter.

    pip downloads with the user's configuration: indexes, mirrors, folders of wheels. With `other_builds` a package may
    have other files than the pack recorded. ConfigError when it may not; BackendError when pip fails.
    """
    here = ".".join(map(str, sys.version_info[:2]))
    if not contents.python.startswith(f"{here}."):
        say(f"note: the run had Python {contents.python}; this makes an environment of {here}")
    _run([sys.executable, "-I", "-m", "venv", str(folder)], environ)
    # -I: neither the current folder nor PYTHON... variables decide which pip this is
    python, downloads = folder / ("Scripts" if os.name == "nt" else "bin") / "python", folder / "wheels"
    downloads.mkdir()
    wanted = [pinned(name, each["version"]) for name, each in contents.packages.items()]
    if wanted:
        options = ["--no-deps", "--only-binary", ":all:", "--dest", str(downloads)]
        _run([str(python), "-I", *PIP, "download", *options, *wanted], environ)
    files = [*_checked_downloads(contents, wheels, downloads, other_builds=other_builds)]
    hashes = [(unpacked / wheel.packed.member, wheel.sha256) for wheel in wheels]
    hashes += [(file, _sha256(file)) for file in files]
    listed = folder / "requirements.txt"
    listed.write_text("".join(f"{file.as_uri()} --hash=sha256:{digest}\n" for file, digest in hashes), encoding="utf-8")
    options = ["--no-index", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--requirement", str(listed)]
    _run([str(python), "-I", *PIP, "--isolated", "install", *options], environ)
    return python


def _checked_downloads(
    contents: Contents, wheels: Sequence[CheckedWheel], folder: Path, *, other_builds: bool
) -> list[Path]:
    """The downloaded wheels: one for each listed package, with the listed files."""
    files, problems = sorted(folder.iterdir()), list[Problem]()
    left = {canonicalize_name(name): each for name, each in contents.packages.items()}
    owners = {module: wheel.packed.name for wheel in wheels for module in wheel.modules}
    for file in files:
        with file.open("rb") as stream:
            read = read_wheel(file, file.name, stream)
        listed = left.pop(canonicalize_name(read.name), None)
        if listed is None or Version(read.version).public != Version(listed["version"]).public:
            raise refused(file, f"{file.name} is not in the list of the pack")
        if both := sorted(read.modules & owners.keys()):
            raise refused(contents.opened.file, f"{owners[both[0]]} and {read.name} both hold the module {both[0]!r}")
        if not other_builds and (not listed["digest"] or _digest(read) != listed["digest"]):
            what = f"{read.name} {read.version} of your index has not the files that the pack lists"
            fix = "--here in an environment with that build, or --other-builds if another one will do"
            problems.append(Problem(where=printable(str(contents.opened.file)), what=what, fix=fix))
    if left:
        raise refused(contents.opened.file, f"pip found no wheel for {', '.join(left)}")
    if problems:
        raise ConfigError(*problems)
    return files


def _digest(read: ReadWheel) -> str:
    """The digest that the installed files will have: see `packages.installed_digests`."""
    files: dict[str, str] = {}
    for path, digest in read.files.items():
        top, _, rest = path.partition("/")
        kind, _, inside = rest.partition("/")
        if not top.endswith(".data"):
            files[path] = digest
        elif kind in ("purelib", "platlib"):
            files[inside] = digest
    return digest_of({path: each for path, each in files.items() if not path.partition("/")[0].endswith(METADATA)})


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _run(command: list[str], environ: Mapping[str, str]) -> None:
    done = subprocess.run(
        command, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        why = "\n".join(printable(line) for line in (done.stderr or done.stdout).strip().splitlines()[-8:])
        fix = "correct pip's configuration (index, constraints), or rerun in an environment of yours with --here"
        raise BackendError(
            Problem(where=" ".join(command[:4]), what="the environment cannot be made", why=why, fix=fix)
        )
