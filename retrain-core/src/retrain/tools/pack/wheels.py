"""Makes a wheel of an installed distribution, or of its clone.

The format is https://packaging.python.org/specifications/binary-distribution-format: the modules, the metadata without
an installer's additions, and a RECORD of the hashes. Nothing is built, so no build backend is needed on either side.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath
from typing import IO, Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.discover import normal_name
from retrain.kernel.plugins.first_party import own_distributions
from retrain.kernel.plugins.installed import files_of, versions_of
from retrain.kernel.plugins.missing import source_folder
from retrain.kernel.plugins.requirements import requirements_of
from retrain.records.identity.hashing import files_below, located
from retrain.records.reading import read_regular
from retrain.tools.pack import archive as packs

OF_THE_INSTALLER = frozenset({"RECORD", "RECORD.jws", "INSTALLER", "REQUESTED", "direct_url.json"})
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)")
_SKIPPED = (".pyc", ".pth")
_TAG = re.compile(r"^Tag: ([\w.-]+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A wheel's file name, its bytes, and its text files by the path below the folder of its modules.

    `is_editable`: made from a folder that it was installed from by path.
    """

    file: str
    content: bytes
    sources: dict[str, bytes]
    is_editable: bool


def wheel_of(name: str, version: str, modules: Iterable[str]) -> Wheel:
    """Return the wheel of an installed distribution of which these top-level modules are used."""
    recorded = [file for file in files_of(name) if ".." not in file.parts and not str(file).endswith(".pyc")]
    info = next((file.parts[0] for file in recorded if file.parts[0].endswith(".dist-info")), "")
    if not info:
        what = f"{name} was not installed by an installer that records its files, so no wheel can be built from it"
        fix = f"pip install it, or leave it out: RETRAIN_BLOCK={name}"
        raise ConfigError(Problem(code="pack.no-install-record", where=name, what=what, fix=fix))
    metadata = {
        str(file): read_regular(Path(str(file.locate())))
        for file in recorded
        if file.parts[0] == info and not (len(file.parts) == 2 and file.parts[1] in OF_THE_INSTALLER)
    }
    tops = {packs.top_level(str(file)) for file in recorded}
    is_editable = source_folder(name) is not None and not tops.intersection(modules)
    sources = {}
    if is_editable:
        for place, is_folder in map(located, sorted(modules)):
            for path in files_below(place) if is_folder else [place] if place else []:
                below = PurePosixPath(os.path.relpath(path, Path(place).parent)).as_posix()
                sources[below] = read_regular(Path(path))
    else:
        own = [file for file in recorded if file.parts[0] not in (info, "/")]
        sources = {str(file): read_regular(Path(str(file.locate()))) for file in own}
    members = {**dict(sorted(sources.items())), **dict(sorted(metadata.items()))}
    lines = [f"{path},sha256={_base64(hashlib.sha256(content))},{len(content)}\n" for path, content in members.items()]
    members[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"]).encode()
    tags = _TAG.findall(metadata.get(f"{info}/WHEEL", b"").decode("utf-8", "replace"))
    # A file name has one tag for all: `cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64`.
    parts = zip(*(tag.split("-") for tag in tags if tag.count("-") == 2), strict=True)
    tag = "py3-none-any" if is_editable or not tags else "-".join(".".join(dict.fromkeys(each)) for each in parts)
    file = f"{re.sub(r'[-_.]+', '_', name)}-{version}-{tag}.whl"
    return Wheel(file=file, content=packs.zipped(members), sources=sources, is_editable=is_editable)


# The wheels in a pack, checked before anything of them is installed.
#
# `retrain pack` writes wheels of modules and metadata. Scripts, data for other places, modules of other distributions
# and files that Python reads at its start are refused. A wheel of retrain is *known* when it has the same files as the
# retrain that reads the pack.


# The same words as in `archive`: `retrain help` finds a fix in the module that gives it.
MAKER = "get a new copy of the pack from its author"
MAX_WHEEL_BYTES = 2**28  # of a plugin's modules, unpacked
# The format gives a RECORD no hash of these.
SIGNATURES = ("RECORD", "RECORD.jws", "RECORD.p7s")
# Two builds of the same modules differ in these, by the tool that built them.
NOT_RUN = ("METADATA", "WHEEL")
DAMAGED = (zipfile.BadZipFile, zlib.error, OSError, EOFError, KeyError, ValueError, NotImplementedError, RuntimeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedWheel:
    """A wheel with its SHA-256 and top-level modules; `changed` are the files of retrain that differ from those here.

    With such files it needs the user's trust: it would run in place of the retrain that is installed.
    """

    packed: packs.PackedWheel
    sha256: str
    modules: frozenset[str]
    changed: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        return normal_name(self.packed.name) in own_distributions()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadWheel:
    """A wheel whose name, metadata and hashes agree; `files` are base64 SHA-256 by path, `folder` its `.dist-info`."""

    name: str
    version: str
    folder: str
    files: Mapping[str, str] = field(repr=False)

    @property
    def modules(self) -> frozenset[str]:
        paths = (path for path in self.files if not path.startswith(f"{self.folder}/"))
        return frozenset(packs.top_level(path) for path in paths if "/" in path or packs.is_importable(path))


def read_wheel(where: Path | str, file: str, stream: IO[bytes]) -> ReadWheel:
    """Check a wheel against its file name, its METADATA and its RECORD; ConfigError names the first fault."""
    try:
        name, version, _, _ = parse_wheel_filename(file)
        with zipfile.ZipFile(stream) as archive:
            names = archive.namelist()
            (folder,) = {name.partition("/")[0] for name in names if name.partition("/")[0].endswith(".dist-info")}
            parsed = HeaderParser().parsestr(archive.read(f"{folder}/METADATA").decode("utf-8"))
            headers = [text for header in ("Name", "Version") for text in parsed.get_all(header, [])]
            for source, named in (("METADATA", headers), (folder, folder.removesuffix(".dist-info").split("-"))):
                if len(named) != 2 or (canonicalize_name(named[0]), Version(named[1])) != (name, version):
                    what = f"{file} says in its {source} that it is {' '.join(named)}"
                    raise packs.refused(where, code="pack.wheel-name-differs", what=what, fix=MAKER)
            rows = csv.reader(io.StringIO(archive.read(f"{folder}/RECORD").decode("utf-8")))
            files = {row[0]: row[1].partition("sha256=")[2] for row in rows if row}
            if bad := _first_fault(archive, folder, files):
                raise packs.refused(
                    where, code="pack.not-as-listed", what=f"{file}: {bad} is not as its RECORD lists it", fix=MAKER
                )
    except ConfigError:
        raise
    except (InvalidWheelFilename, InvalidVersion, *DAMAGED) as error:
        what = f"{file} is not a usable wheel: {str(error)[:200]}"
        raise packs.refused(where, code="pack.not-a-wheel", what=what, fix=MAKER) from error
    return ReadWheel(name=str(name), version=str(version), folder=folder, files=files)


def _first_fault(archive: zipfile.ZipFile, folder: str, files: Mapping[str, str]) -> str:
    signatures = {f"{folder}/{name}" for name in SIGNATURES}
    names = {info.filename for info in archive.infolist() if not info.is_dir()}
    if odd := sorted((names ^ set(files)) - signatures):
        return odd[0]
    for name in sorted(names - signatures):
        digest = hashlib.sha256()
        with archive.open(name) as member:
            while chunk := member.read(packs.CHUNK):
                digest.update(chunk)
        if _base64(digest) != files[name].rstrip("="):
            return name
    return ""


def _base64(digest: hashlib._Hash) -> str:
    return base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()


def check_wheels(contents: packs.Contents) -> tuple[CheckedWheel, ...]:
    """Return the wheels of a pack; ConfigError for one that holds more than the modules of its distribution."""
    found: list[CheckedWheel] = []
    owners: dict[str, str] = {}
    for packed in contents.wheels:
        wheel = _checked(contents.opened, packed)
        for module in sorted(wheel.modules):
            if (other := owners.setdefault(module.casefold(), packed.name)) != packed.name:
                what = f"{packed.name} and {other} both hold the module {module!r}"
                raise packs.refused(contents.opened.file, code="pack.module-twice", what=what, fix=MAKER)
        found.append(wheel)
    return tuple(found)


def _checked(opened: packs.Opened, packed: packs.PackedWheel) -> CheckedWheel:
    file = packed.member.rpartition("/")[2]
    too_large = f"{file} is larger than {MAX_WHEEL_BYTES // 2**20} MiB"
    if opened.files[packed.member]["size"] > MAX_WHEEL_BYTES:
        raise packs.refused(opened.file, code="pack.too-large", what=too_large, fix=MAKER)
    content = opened.read(packed.member)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            infos = archive.infolist()
    except DAMAGED as error:
        what = f"{file} is not a usable wheel: {error}"
        raise packs.refused(opened.file, code="pack.not-a-wheel", what=what, fix=MAKER) from error
    packs.check_members(Path(f"{opened.file}: {file}"), infos)
    if sum(info.file_size for info in infos) > MAX_WHEEL_BYTES:
        raise packs.refused(opened.file, code="pack.too-large", what=f"{too_large} unpacked", fix=MAKER)
    read = read_wheel(opened.file, file, io.BytesIO(content))
    if (read.name, Version(read.version)) != (canonicalize_name(packed.name), Version(packed.version)):
        what = f"{file} is listed as {packed.name} {packed.version}"
        raise packs.refused(opened.file, code="pack.wheel-name-differs", what=what, fix=MAKER)
    own = packs.own_module(normal_name(packed.name)) if normal_name(packed.name) in own_distributions() else ""
    for path in read.files:
        if _is_foreign(path, read.folder, own):
            what = f"{file} holds {path}: not a module of {packed.name}"
            raise packs.refused(opened.file, code="pack.foreign-file", what=what, fix=MAKER)
    changed = _changed(read, packed.name, {own}) if own else ()
    sha256 = str(opened.files[packed.member]["sha256"])
    return CheckedWheel(packed=packed, sha256=sha256, modules=read.modules, changed=changed)


def _is_foreign(path: str, info: str, own: str) -> bool:
    """True for scripts, data and metadata of another distribution, and files that would run unnoticed."""
    folder, lower = path.partition("/")[0], path.casefold()
    if folder == info:
        return False
    if folder.casefold().endswith((".data", *packs.METADATA)) or lower.endswith((".pth", *packs.BYTE_CODE)):
        return True
    return (
        packs.top_level(path) != own
        and ("/" in path or packs.is_importable(path))
        and packs.shadowed(packs.top_level(path))
    )


def _changed(read: ReadWheel, name: str, modules: Iterable[str]) -> tuple[str, ...]:
    """Return the files of one of our distributions that differ from the installed ones, in either direction."""
    if not (version := versions_of([name]).get(name)):
        return (f"{name} is not installed here",)
    here = wheel_of(name, version, modules)
    installed = read_wheel(name, here.file, io.BytesIO(here.content))
    packed, own = _run_files(read), _run_files(installed)
    return tuple(sorted(path for path in {*packed, *own} if packed.get(path) != own.get(path)))


def _run_files(read: ReadWheel) -> dict[str, str]:
    prefix, skipped = f"{read.folder}/", (*SIGNATURES, *NOT_RUN)
    return {
        path.replace(prefix, ".dist-info/", 1): digest
        for path, digest in read.files.items()
        if not (path.startswith((f"{prefix}licenses/", f"{prefix}LICEN")) or path.removeprefix(prefix) in skipped)
    }


# The packages that a run depends on: their versions, and a digest of each one's installed files.


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
            # Old metadata of others may hold one; pip installs nothing for it either.
            except InvalidRequirement:
                continue
            if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *each[1])):
                todo.append((normal_name(wanted.name), tuple(sorted(wanted.extras))))
    return dict(sorted(versions_of({name for name, _ in done}).items()))


def installed_digests(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return version, and a digest over the recorded hashes of the installed files; empty without hashes.

    Byte code, scripts and metadata, the installer's additions, are not counted.
    """
    found = {}
    for name, version in versions_of(names).items():
        files = [file for file in files_of(name) if ".." not in file.parts and ".dist-info" not in file.parts[0]]
        digest = digest_of({str(file): file.hash.value for file in files if file.hash})
        found[name] = {"version": version, "digest": digest}
    return found


def digest_of(files: Mapping[str, str]) -> str:
    lines = sorted(f"{path}\0{value}\n" for path, value in files.items() if not path.endswith(_SKIPPED))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32] if lines else ""


def digests_in(python: Path | str, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return `installed_digests` of another environment, by its interpreter; ConfigError when it does not answer."""
    wanted = list(names)
    if str(python) == sys.executable:
        return installed_digests(wanted)
    code = (
        "import json, sys; from retrain.tools.pack.wheels import installed_digests; "
        "print(json.dumps(installed_digests(json.load(sys.stdin))))"
    )
    command = [str(python), "-I", "-c", code]
    done = subprocess.run(command, input=json.dumps(wanted), capture_output=True, text=True, timeout=300, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        what, fix = f"does not list its packages: {done.stderr.strip()[-300:]}", "see the messages of pip above"
        raise ConfigError(Problem(code="rerun.packages-unlisted", where=str(python), what=what, fix=fix)) from error
    return found


def pinned(name: str, version: str) -> str:
    """Return a requirement of one version, without the local label of a build (2.13.0 for `2.13.0+cpu`)."""
    return f"{name}=={version.partition('+')[0]}"
