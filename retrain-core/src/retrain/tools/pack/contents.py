"""The manifest of a pack, checked: nothing in it can name a place outside the pack, or an option of pip."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SkipValidation, ValidationInfo, model_validator

from retrain.kernel.config.toml_file import parse_toml
from retrain.records.reading import parse_record
from retrain.records.record_names import CONFIG_FILE, METRICS, RUN_FILE
from retrain.tools.pack.archive import Opened, is_safe, refusal, refused
from retrain.tools.pack.lines import Line


def _safe(name: str) -> str:
    if not is_safe(name):
        raise ValueError("leaves its folder")
    return name


def _member(name: str, info: ValidationInfo) -> str:
    if name not in (info.context or {})["files"]:
        raise ValueError("is no file of the pack")
    return name


def _release(each: dict[str, Any]) -> dict[str, Any]:
    digest = each["digest"]  # empty for a package whose installer recorded no hashes
    if not re.fullmatch(VERSION, each["version"]) or not re.fullmatch("([0-9a-f]{32})?", digest):
        raise ValueError("is no version with a digest")
    return {"version": each["version"], "digest": digest}


NAME, VERSION = r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", r"^[A-Za-z0-9][A-Za-z0-9._+!-]*$"
Name = Annotated[str, Field(pattern=NAME)]
Version = Annotated[str, Field(pattern=VERSION)]
Place = Annotated[str, AfterValidator(_safe)]
Member = Annotated[str, AfterValidator(_member)]
Threads = dict[
    Literal["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"], Annotated[str, Field(pattern="^[0-9]{1,4}$")]
]


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
    packages: dict[Name, Annotated[dict[str, Any], AfterValidator(_release)]]
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

    def lines(self, run: PackedRun) -> list[Line]:
        text = self.opened.read(f"{run.place}/{METRICS}")
        return [parse_record(line) for line in text.splitlines() if line.strip()]

    def record(self, name: str) -> Mapping[str, Any]:
        return parse_record(self.opened.read(name))


def read_contents(opened: Opened) -> Contents:
    """Return the checked manifest of a pack; ConfigError names the fault."""
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
        raise refused(opened.file, f"its manifest cannot be used: {' '.join(str(error).split())[:200]}") from error
