"""Makes a wheel of a distribution as it is installed, or lies in its clone: what a run used, installable elsewhere.

The format is https://packaging.python.org/specifications/binary-distribution-format: the modules, the metadata without
what an installer adds, and a RECORD of the hashes. Nothing is built, so no build backend is needed on either side.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.installed import files_of, source_folder
from retrain.records.identity.hashing import files_below
from retrain.records.identity.plugin_files import located
from retrain.records.reading import read_regular
from retrain.tools.pack.archive import zipped

OF_THE_INSTALLER = frozenset({"RECORD", "RECORD.jws", "INSTALLER", "REQUESTED", "direct_url.json"})
_TAG = re.compile(r"^Tag: ([\w.-]+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A wheel's file name, its bytes, and the text files in it by the path below the place of its modules.

    `is_editable`: made from a folder that it was installed from by path.
    """

    file: str
    content: bytes
    sources: dict[str, bytes]
    is_editable: bool


def wheel_of(name: str, version: str, modules: Iterable[str]) -> Wheel:
    """The wheel of an installed distribution of which these top-level modules are used; ConfigError if it has none."""
    recorded = [file for file in files_of(name) if ".." not in file.parts and not str(file).endswith(".pyc")]
    info = next((file.parts[0] for file in recorded if file.parts[0].endswith(".dist-info")), "")
    if not info:
        what = f"{name} was not installed by an installer that records its files: no wheel can be made of it"
        raise ConfigError(Problem(where=name, what=what, fix=f"pip install it, or leave it out: RETRAIN_BLOCK={name}"))
    metadata = {
        str(file): read_regular(Path(str(file.locate())))
        for file in recorded
        if file.parts[0] == info and not (len(file.parts) == 2 and file.parts[1] in OF_THE_INSTALLER)
    }
    is_editable = source_folder(name) is not None and not any(_is_module(str(file), modules) for file in recorded)
    if is_editable:
        sources = dict(_of_modules(modules))
    else:
        sources = {
            str(file): read_regular(Path(str(file.locate()))) for file in recorded if file.parts[0] not in (info, "/")
        }
    members = {**dict(sorted(sources.items())), **dict(sorted(metadata.items()))}
    record = f"{info}/RECORD"
    members[record] = "".join(map(_recorded, members.items())).encode() + f"{record},,\n".encode()
    tags = _TAG.findall(metadata.get(f"{info}/WHEEL", b"").decode("utf-8", "replace"))
    tag = "py3-none-any" if is_editable or not tags else _compressed(tags)
    file = f"{re.sub(r'[-_.]+', '_', name)}-{version}-{tag}.whl"
    return Wheel(file=file, content=zipped(members), sources=sources, is_editable=is_editable)


def _is_module(file: str, modules: Iterable[str]) -> bool:
    return any(file == f"{top}.py" or file.startswith(f"{top}/") for top in modules)


def _of_modules(modules: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    for top in sorted(modules):
        place, is_folder = located(top)
        parent = Path(place).parent
        for path in files_below(place) if is_folder else [place] if place else []:
            yield PurePosixPath(os.path.relpath(path, parent)).as_posix(), read_regular(Path(path))


def _recorded(member: tuple[str, bytes]) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(member[1]).digest()).rstrip(b"=").decode()
    return f"{member[0]},sha256={digest},{len(member[1])}\n"


def _compressed(tags: list[str]) -> str:
    """The tags in one: `cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64`."""
    parts = [tag.split("-") for tag in tags if tag.count("-") == 2]
    return "-".join(".".join(dict.fromkeys(each[column] for each in parts)) for column in range(3))
