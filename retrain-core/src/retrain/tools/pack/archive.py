"""The file of a pack: a zip archive, the same bytes for the same content, untrusted when it is read; its manifest.

Names are relative, in plain form and unique even where case is ignored; nothing is a link; sizes are bounded before and
while a member is read, and its SHA-256 must be the one in `pack.json`. A pack is unpacked into a new folder only.
Nothing in the manifest can name a place outside the pack, or an option of pip.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
import sys
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import all_suffixes
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SkipValidation, ValidationInfo, model_validator
from typing_extensions import TypedDict

from retrain.kernel.config.toml_file import open_regular, parse_toml
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.first_party import own_distributions
from retrain.records.files import write_bytes
from retrain.records.reading import Record, parse_record
from retrain.records.record_names import CONFIG_FILE, METRICS, RUN_FILE
from retrain.text.terminal_text import printable

MANIFEST, FORMAT = "pack.json", 1
MAKER = "get a new copy of the pack from its author"
MAX_FILES, MAX_NAME, MAX_DEPTH = 50_000, 240, 30
MAX_BYTES = 2**33  # unpacked, all members together
MAX_MANIFEST_BYTES = 2**26
CHUNK = 2**20
# The earliest time that a zip archive can name. One fixed time keeps the bytes of a pack the same.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_RESERVED = re.compile(r"[\x00-\x1f\x7f\\:*?\"<>|]")
# The folder of a rerun is on the import path, for the pack's code. So code is listed by file and hash, and data may
# be nothing that Python imports: no tool may run or obey an unlisted file.
BYTE_CODE = (".pyc", ".pyo")  # runs in place of the listed source, whatever that says
IMPORTED = (*all_suffixes(), *BYTE_CODE, ".py", ".pyw", ".pyd", ".so", ".dll", ".dylib", ".pth", ".egg", ".egg-link")
METADATA = (".dist-info", ".egg-info", ".egg", ".egg-link")
AT_START = frozenset({"sitecustomize", "usercustomize"})  # Python imports them by itself


def refused(where: Path | str, *, code: str, what: str, fix: str) -> ConfigError:
    """Return the error for a pack that cannot be used; the names in it are untrusted."""
    return ConfigError(Problem(code=code, where=printable(str(where)), what=printable(what), fix=fix))


def is_safe(name: object) -> bool:
    """True if a name stays in the folder below which it is written, on every system."""
    if not isinstance(name, str) or not name or len(name) > MAX_NAME or _RESERVED.search(name):
        return False
    parts = name.split("/")
    fault = any(part in ("", ".", "..") or part != part.rstrip(". ") for part in parts)
    return not fault and len(parts) <= MAX_DEPTH and name.isprintable()


def write_pack(file: Path, manifest: Mapping[str, Any], members: Mapping[str, bytes]) -> None:
    """Write a pack; `manifest` gets the size and hash of every member. ValueError for a name that is not safe."""
    if unsafe := next((name for name in members if not is_safe(name)), None):
        raise ValueError(f"{unsafe!r} cannot be the name of a member")
    listed = {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in sorted(members.items())
    }
    text = json.dumps({**manifest, "files": listed}, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_bytes(file, zipped({MANIFEST: text.encode(), **dict(sorted(members.items()))}))


def zipped(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            info = zipfile.ZipInfo(name, _EPOCH)
            info.compress_type, info.create_system, info.external_attr = zipfile.ZIP_DEFLATED, 3, 0o644 << 16
            archive.writestr(info, content)
    return buffer.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A pack whose names and sizes are checked, with its manifest; contents are checked while they are read."""

    file: Path
    manifest: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]

    def read(self, name: str) -> bytes:
        stream = io.BytesIO()
        with open_regular(self.file) as source, zipfile.ZipFile(source) as archive:
            self._copy(archive, name, stream)
        return stream.getvalue()

    def unpack(self, folder: Path) -> None:
        """Write every member below the new `folder`; ConfigError when it exists, or a member is not as listed."""
        try:
            folder.mkdir(parents=True)
            with open_regular(self.file) as source, zipfile.ZipFile(source) as archive:
                for name in self.files:
                    target = folder / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
                    with os.fdopen(os.open(target, flags, 0o644), "wb") as stream:
                        self._copy(archive, name, stream)
        except FileExistsError as error:
            what, fix = "exists already", "give another folder with --into, or remove it"
            raise refused(error.filename or folder, code="rerun.folder-exists", what=what, fix=fix) from error
        except OSError as error:
            what = f"cannot be written: {error.strerror or error}"
            fix = "free space, or give another folder with --into"
            raise refused(error.filename or folder, code="rerun.unwritable", what=what, fix=fix) from error

    def _copy(self, archive: zipfile.ZipFile, name: str, stream: BinaryIO) -> None:
        listed, digest, size = self.files[name], hashlib.sha256(), 0
        try:
            # Stops at the first chunk past the listed size: a member may unpack to far more than it says.
            with archive.open(name) as member:
                while size <= listed["size"] and (chunk := member.read(CHUNK)):
                    size += len(chunk)
                    digest.update(chunk)
                    stream.write(chunk)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise refused(self.file, code="pack.damaged", what=f"{name} is damaged: {error}", fix=MAKER) from error
        if size != listed["size"] or digest.hexdigest() != listed["sha256"]:
            what = f"{name} is not the file that {MANIFEST} lists: size or hash differs"
            raise refused(self.file, code="pack.not-as-listed", what=what, fix=MAKER)


def open_pack(file: Path) -> Opened:
    try:
        with open_regular(file) as source, zipfile.ZipFile(source) as archive:
            infos = archive.infolist()
            check_members(file, infos)
            if archive.getinfo(MANIFEST).file_size > MAX_MANIFEST_BYTES:
                what = f"its {MANIFEST} is larger than {MAX_MANIFEST_BYTES // 2**20} MiB"
                raise refused(file, code="pack.too-large", what=what, fix=MAKER)
            with archive.open(MANIFEST) as stream:
                manifest = parse_record(stream.read(MAX_MANIFEST_BYTES + 1))
    except FileNotFoundError:
        what, fix = "there is no such file", "give a file that `retrain pack` wrote"
        raise refused(file, code="pack.missing", what=what, fix=fix) from None
    except ConfigError:
        raise
    except (OSError, zipfile.BadZipFile, ValueError, KeyError, EOFError, zlib.error, RuntimeError) as error:
        what, fix = f"is not a pack: {error}", "give a file that `retrain pack` wrote"
        raise refused(file, code="pack.not-a-pack", what=what, fix=fix) from error
    if manifest.get("format") != FORMAT:
        what = f"is a pack of format {str(manifest.get('format'))[:20]!r}; this reads {FORMAT}"
        fix = "use the version of retrain that made it, or a newer one"
        raise refused(file, code="pack.other-format", what=what, fix=fix)
    files, sizes = manifest.get("files"), {info.filename: info.file_size for info in infos}
    if not isinstance(files, dict) or {*files, MANIFEST} != {*sizes}:
        raise refused(file, code="pack.not-as-listed", what=f"holds other files than {MANIFEST} lists", fix=MAKER)
    for name, listed in files.items():
        is_entry = isinstance(listed, dict) and isinstance(listed.get("sha256"), str)
        if not is_entry or listed.get("size") != sizes[name]:
            raise refused(file, code="pack.not-as-listed", what=f"{name} is not as {MANIFEST} lists it", fix=MAKER)
    return Opened(file=file, manifest=manifest, files=files)


def check_members(file: Path, infos: list[zipfile.ZipInfo]) -> None:
    """Check that names stay inside and are unique, and nothing is a link or a bomb."""
    if len(infos) > MAX_FILES or sum(info.file_size for info in infos) > MAX_BYTES:
        what = f"holds more than {MAX_FILES} files, or more than {MAX_BYTES // 2**30} GiB"
        raise refused(file, code="pack.too-large", what=what, fix=MAKER)
    seen: set[str] = set()
    for info in infos:
        # The mode is in the upper half, and 0 where the archive was made on Windows.
        name, kind = info.filename, stat.S_IFMT(info.external_attr >> 16)
        # zipfile cuts a name at a zero byte, so that other tools would see another one.
        if not is_safe(name) or info.orig_filename != name:
            what = f"holds {name[:MAX_NAME]!r}, a name that could leave its folder"
            raise refused(file, code="pack.unsafe-name", what=what, fix=MAKER)
        if kind not in (0, stat.S_IFREG) or info.is_dir():
            raise refused(file, code="pack.unsafe-member", what=f"holds {name!r}: not a regular file", fix=MAKER)
        # Bit 0 says that a member is encrypted.
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            what = f"{name!r} is encrypted, or compressed in an unknown way"
            raise refused(file, code="pack.unsafe-member", what=what, fix=MAKER)
        # By folded case: macOS and Windows would lay both in one file.
        if name.casefold() in seen:
            raise refused(file, code="pack.double-name", what=f"holds {name!r} twice", fix=MAKER)
        seen.add(name.casefold())
    for name in seen:
        if any(str(parent) in seen for parent in PurePosixPath(name).parents):
            raise refused(file, code="pack.double-name", what=f"holds {name!r} below a file", fix=MAKER)


def own_module(distribution: str) -> str:
    return "retrain" if distribution == "retrain-core" else distribution.replace("-", "_")


def shadowed(name: str) -> bool:
    """True if a top-level module of this name would take the place of Python's, or of retrain's."""
    ours = {own_module(each) for each in own_distributions()}
    return name.casefold() in {*map(str.casefold, sys.stdlib_module_names), *AT_START, *ours}


def top_level(path: str) -> str:
    """Return the module of a file below an import folder: `a` for `a/b.py` and `a.cpython-311-darwin.so`."""
    return path.partition("/")[0].partition(".")[0]


def is_importable(path: str) -> bool:
    """True if Python may run this file as a module, or read it at its start."""
    return path.casefold().endswith(tuple(map(str.casefold, IMPORTED)))


def refusal(kind: str, place: str) -> str:
    """Return why a file of a kind (`code`, `data`, `model`) may not be laid at a place; empty if it may."""
    parts = PurePosixPath(place.casefold()).parts
    if any(part.startswith(".") for part in parts):
        return "is hidden: tools read such files as their settings"
    if any(part.endswith(METADATA) for part in parts):
        return "would be taken for an installed distribution"
    if place.casefold().endswith(BYTE_CODE):
        return "is byte code"
    if kind == "data" and is_importable(place):
        return "is data, and Python would import it"
    if is_importable(place) and shadowed(top_level(place)):
        return f"would be imported in place of the module {top_level(place)!r}"
    return ""


# The manifest, checked.


def _safe(name: str) -> str:
    if not is_safe(name):
        raise ValueError("leaves its folder")
    return name


def _member(name: str, info: ValidationInfo) -> str:
    if name not in (info.context or {})["files"]:
        raise ValueError("is no file of the pack")
    return name


NAME, VERSION = r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", r"^[A-Za-z0-9][A-Za-z0-9._+!-]*$"
Name = Annotated[str, Field(pattern=NAME)]
Version = Annotated[str, Field(pattern=VERSION)]
Place = Annotated[str, AfterValidator(_safe)]
Member = Annotated[str, AfterValidator(_member)]
Threads = dict[
    Literal["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"], Annotated[str, Field(pattern="^[0-9]{1,4}$")]
]


class Release(TypedDict):
    version: Version
    digest: Annotated[str, Field(pattern="^([0-9a-f]{32})?$")]  # empty where the installer recorded no hashes


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class PlacedFile(_Checked):
    """A file of code, data or a model: its name in the configuration, and where a rerun lays it.

    `member` is empty for one that was left out; `hash` is BLAKE2b, 16 bytes.
    """

    kind: Literal["code", "data", "model"]
    name: str
    place: Place
    member: Member | Literal[""] = ""
    hash: str
    size: int

    @model_validator(mode="after")
    def _may_be_laid(self) -> Self:
        if why := refusal(self.kind, self.place):
            raise ValueError(f"{self.place!r} {why}")
        if self.place.casefold().partition("/")[0] in (CONFIG_FILE, "rerun"):
            raise ValueError(f"{self.place!r} cannot be laid there")
        return self


class PackedWheel(_Checked):
    name: Name
    version: Version
    member: Annotated[Member, Field(pattern=r"^wheels/[A-Za-z0-9_.+!-]+\.whl$")]


class PackedRun(_Checked):
    """A run: `name` is its folder in a campaign, empty for a single run; `place` the folder of its records here."""

    name: str
    place: Place
    condition: str
    seed: int | None
    steps: int
    identity: Member
    weights: dict[str, str]

    @model_validator(mode="after")
    def _has_records(self, info: ValidationInfo) -> Self:
        if self.name and (not is_safe(self.name) or "/" in self.name):
            raise ValueError(f"{self.name[:80]!r} cannot be the name of a run")
        for record in (METRICS, RUN_FILE):
            _member(f"{self.place}/{record}", info)
        return self


class Contents(_Checked):
    """A pack. `packages` are versions and digests of the packages that its plugins need, by name."""

    opened: SkipValidation[Opened]
    name: str
    kind: Literal["run", "campaign"]
    python: Version
    threads: Threads
    files: list[PlacedFile]
    wheels: list[PackedWheel]
    packages: dict[Name, Release]
    runs: list[PackedRun] = Field(min_length=1)
    moved: dict[str, Place]
    equivalence: float | None = Field(gt=0.0, le=1.0)
    verdict: dict[str, Any] | None

    @model_validator(mode="after")
    def _has_one_file_in_a_place(self) -> Self:
        places = [file.place.casefold() for file in self.files]
        parents = {str(parent) for place in places for parent in PurePosixPath(place).parents}
        if len(set(places)) < len(places) or parents & set(places) or CONFIG_FILE not in self.opened.files:
            raise ValueError("no configuration, or two files in one place")
        return self

    @property
    def is_campaign(self) -> bool:
        return self.kind == "campaign"

    def config(self) -> dict[str, Any]:
        return parse_toml(self.opened.read(CONFIG_FILE).decode("utf-8"), f"{self.opened.file}:{CONFIG_FILE}")

    def lines(self, run: PackedRun) -> list[Record]:
        text = self.opened.read(f"{run.place}/{METRICS}")
        return [parse_record(line) for line in text.splitlines() if line.strip()]

    def record(self, name: str) -> Record:
        return parse_record(self.opened.read(name))


def read_contents(opened: Opened) -> Contents:
    manifest = opened.manifest
    try:
        content = {
            **manifest,
            "opened": opened,
            "name": manifest["name"][:80],
            "threads": manifest["hardware"].get("threads", {}),
            "files": [*manifest["placed"], *manifest["left_out"]],
            "wheels": [{**each, "name": name} for name, each in sorted(manifest["wheels"].items())],
            "packages": dict(sorted(manifest["packages"].items())),
        }
        return Contents.model_validate(content, context={"files": opened.files})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"its manifest cannot be used: {' '.join(str(error).split())[:200]}"
        raise refused(opened.file, code="pack.bad-manifest", what=what, fix=MAKER) from error
