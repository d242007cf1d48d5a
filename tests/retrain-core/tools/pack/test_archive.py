"""Packs as a hostile stranger may make them: nothing leaves the folder, nothing is larger than it says."""

from __future__ import annotations

import hashlib
import json
import stat
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.kernel.errors import ConfigError
from retrain.tools.pack.archive import FORMAT, MANIFEST, is_safe, open_pack, read_contents, write_pack
from tests.kit import packs
from tests.kit.packs import RUN, manifest
from tests.kit.problems import codes_in, refused

Member = tuple[str | zipfile.ZipInfo, bytes]


def hostile(file: Path, members: Sequence[Member], **manifest: Any) -> Path:
    """A zip archive as given, with a manifest that vouches for it."""
    files = {}
    for name, content in members:
        text = name if isinstance(name, str) else name.filename
        files[text] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MANIFEST, json.dumps({"format": FORMAT, **manifest, "files": files}))
        for name, content in members:
            archive.writestr(name, content)
    return file


def link(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    return info


def test_what_is_written_is_read_and_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    members = {"b/c.txt": b"two", "a.txt": b"one" * 10_000}
    for name in ("x", "y"):
        write_pack(tmp_path / name, {"format": FORMAT, "name": "n"}, members)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()
    opened = open_pack(tmp_path / "x")
    opened.unpack(tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in members} == members
    assert refused(opened.unpack, tmp_path / "out") == ["rerun.folder-exists"]


@pytest.mark.parametrize(
    ("code", "members"),
    [
        *(("pack.unsafe-name", [(name, b"x")]) for name in ("../evil", "/etc/evil", "a/../../evil", "C:\\evil")),
        *(("pack.unsafe-name", [(name, b"")]) for name in ("a\x1b[2J", "folder/")),
        ("pack.unsafe-member", [(link("here"), b"/etc/passwd")]),
        ("pack.double-name", [("a", b"x"), ("A", b"y")]),
        ("pack.double-name", [("a", b"x"), ("a/b", b"y")]),
    ],
)
def test_a_name_that_could_leave_the_folder_is_refused_before_anything_is_written(
    tmp_path: Path, code: str, members: list[Member]
) -> None:
    assert refused(open_pack, hostile(tmp_path / "p", members)) == [code]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p"]


def test_a_bomb_is_refused_by_claimed_and_by_real_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrain.tools.pack.archive.MAX_BYTES", 2**20)
    assert refused(open_pack, hostile(tmp_path / "p", [("big", bytes(2**21))])) == ["pack.too-large"]
    file = hostile(tmp_path / "q", [("big", bytes(2**16))])
    raw = file.read_bytes().replace((2**16).to_bytes(4, "little"), (10).to_bytes(4, "little"))
    file.write_bytes(raw.replace(b'"size": 65536', b'"size": 10   '))
    with pytest.raises(ConfigError):
        open_pack(file).unpack(tmp_path / "out")
    assert sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file()) <= 2**16


def test_a_member_that_is_not_as_listed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "p"
    write_pack(file, {"format": FORMAT}, {"a.txt": b"said"})
    with zipfile.ZipFile(file) as archive:
        manifest = archive.read(MANIFEST)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(MANIFEST, manifest)
        archive.writestr("a.txt", b"done")
    with pytest.raises(ConfigError) as caught:
        open_pack(file).read("a.txt")
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("more.txt", b"")
    assert codes_in(caught) == refused(open_pack, file) == ["pack.not-as-listed"]


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x03\x04" + bytes(40), b"PK\x05\x06" + bytes(18)])
def test_what_is_no_pack_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "p").write_bytes(content)
    assert refused(open_pack, tmp_path / "p") == ["pack.not-a-pack"]
    assert refused(open_pack, tmp_path / "absent") == ["pack.missing"]


@given(st.text(max_size=30))
def test_a_safe_name_stays_below_its_folder(name: str) -> None:
    if is_safe(name):
        base = Path("/base")
        path = base / name
        assert path != base
        assert path.is_relative_to(base)
        assert ".." not in path.parts


MEMBERS: list[Member] = [*packs.MEMBERS.items(), ("f", b"x")]
FILE = {"kind": "data", "name": "d", "place": "d", "member": "f", "hash": "", "size": 1}


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "other"},
        {"python": "3 --index-url=http://evil"},
        {"packages": {"numpy": {"version": "1\n--index-url http://evil", "digest": ""}}},
        {"packages": {"-r": {"version": "1", "digest": ""}}},
        {"wheels": {"evil": {"version": "1", "member": "f", "extras": [], "first_party": False}}},
        {"hardware": {"threads": {"LD_PRELOAD": "1"}}},
        {"hardware": {"threads": {"OMP_NUM_THREADS": "1;evil"}}},
        {"placed": [{**FILE, "place": "../d"}]},
        {"placed": [{**FILE, "member": "absent"}]},
        {"placed": [FILE, {**FILE, "place": "D"}]},
        {"placed": [FILE, {**FILE, "place": "d/e"}]},
        {"placed": [{**FILE, "place": "config.toml"}]},
        {"left_out": [{**FILE, "place": "/etc/d"}]},
        {"moved": {"a": "../b"}},
        {"runs": []},
        {"runs": [{**RUN, "name": "../x"}]},
        {"runs": [{**RUN, "place": "absent"}]},
        {"equivalence": True},
        {"equivalence": float(7)},
    ],
)
def test_a_hostile_manifest_is_refused(tmp_path: Path, changed: Mapping[str, Any]) -> None:
    hardware = {"threads": {"OMP_NUM_THREADS": "1"}}
    good = hostile(tmp_path / "good", MEMBERS, **manifest(hardware=hardware))
    assert read_contents(open_pack(good)).name == "n"
    bad = open_pack(hostile(tmp_path / "p", MEMBERS, **manifest(**changed)))
    assert refused(read_contents, bad) == ["pack.bad-manifest"]
