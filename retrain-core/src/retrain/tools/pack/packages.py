"""The packages that a run depends on: their versions, and a digest of each one's installed files."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.installed import files_of, normal_name, requirements_of, versions_of

_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)")
_SKIPPED = (".pyc", ".pth")


def extras_of(name: str, words: Iterable[str]) -> list[str]:
    """Return the extras of a distribution that are named like a part that the configuration selects: `judge`."""
    offered = {normal_name(extra) for line in requirements_of(name) for extra in _EXTRA.findall(line)}
    return sorted(offered & {normal_name(word) for word in words})


def required(roots: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return every installed distribution that these need, by its normal name, with its version.

    `roots` are distributions with their extras.
    """
    todo = [(normal_name(name), tuple(extras)) for name, extras in roots.items()]
    done: set[tuple[str, tuple[str, ...]]] = set()
    while todo:
        each = todo.pop()
        if each in done:
            continue
        done.add(each)
        for line in requirements_of(each[0]):
            try:
                wanted = Requirement(line)
            except InvalidRequirement:
                continue  # in third-party metadata; pip would have refused it
            if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *each[1])):
                todo.append((normal_name(wanted.name), tuple(sorted(wanted.extras))))
    return dict(sorted(versions_of({name for name, _ in done}).items()))


def installed_digests(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return version, and a digest over the recorded hashes of the installed files."""
    return {name: {"version": version, "digest": _digest(name)} for name, version in versions_of(names).items()}


def _digest(name: str) -> str:
    """Hash without the installer's additions: byte code, scripts, metadata. Empty where no hashes are recorded."""
    return digest_of(
        {
            str(file): file.hash.value
            for file in files_of(name)
            if file.hash and ".." not in file.parts and ".dist-info" not in file.parts[0]
        }
    )


def digest_of(files: Mapping[str, str]) -> str:
    lines = sorted(f"{path}\0{value}\n" for path, value in files.items() if not path.endswith(_SKIPPED))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32] if lines else ""


def digests_in(python: Path | str, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return `installed_digests` of another environment, by its interpreter; ConfigError when it does not answer."""
    wanted = list(names)
    if str(python) == sys.executable:
        return installed_digests(wanted)
    code = (
        "import json, sys; from retrain.tools.pack.packages import installed_digests; "
        "print(json.dumps(installed_digests(json.load(sys.stdin))))"
    )
    done = subprocess.run(
        [str(python), "-I", "-c", code],
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        what = f"does not tell what is installed: {done.stderr.strip()[-300:]}"
        raise ConfigError(Problem(where=str(python), what=what, fix="see the messages of pip above")) from error
    return found


def pinned(name: str, version: str) -> str:
    """Return a requirement of one version, without the local label of a build (2.13.0 for `2.13.0+cpu`)."""
    return f"{name}=={version.partition('+')[0]}"
