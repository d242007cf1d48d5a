"""Packs as a hostile stranger may make them: nothing leaves the folder, runs or installs more than the listing says."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import stat
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.kernel.errors import ConfigError
from retrain.kernel.plugins.installed import versions_of
from retrain.tools.pack import environment, rerun_command
from retrain.tools.pack.archive import FORMAT, MANIFEST, Contents, is_safe, open_pack, read_contents, write_pack
from retrain.tools.pack.environment import environ_of, lay_out
from retrain.tools.pack.rerun_command import listing
from retrain.tools.pack.wheels import check_wheels, installed_digests, wheel_of
from tests.kit.invoke import invoke
from tests.kit.packs import MEMBERS, RUN, manifest
from tests.kit.problems import codes_in, refused

EVIL = "evil-1.0-py3-none-any.whl"
INFO = "evil-1.0.dist-info"
METADATA = "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\nRequires-Dist: worse @ file:///tmp/worse\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
PLUGIN = {"evil/__init__.py": "x = 1\n", f"{INFO}/METADATA": METADATA, f"{INFO}/WHEEL": WHEEL}
Files = Mapping[str, str | bytes]
Patch = pytest.MonkeyPatch


def wheel(files: Files, *, record: Mapping[str, str] | None = None, info: str = INFO) -> bytes:
    """A wheel of these files; `record` replaces hashes in its RECORD, None leaves them as they are."""
    buffer, rows = io.BytesIO(), io.StringIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            content = text if isinstance(text, bytes) else text.encode()
            archive.writestr(name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            csv.writer(rows).writerow([name, (record or {}).get(name, f"sha256={digest}"), len(content)])
        archive.writestr(f"{info}/RECORD", rows.getvalue() + f"{info}/RECORD,,\n")
    return buffer.getvalue()


def pack(
    folder: Path,
    *,
    wheels: Mapping[str, tuple[str, str, bytes]] | None = None,
    placed: Mapping[str, tuple[str, str]] | None = None,
    packages: Mapping[str, Any] | None = None,
    config: str = "",
) -> Path:
    """A pack with wheels by file (name, version, content), and files by place (kind, text)."""
    members = {**MEMBERS, "config.toml": config.encode()}
    members |= {f"wheels/{file}": content for file, (_, _, content) in (wheels or {}).items()}
    members |= {f"inputs/m{i}": text.encode() for i, (_, text) in enumerate((placed or {}).values())}
    file = folder / "p.rtpack"
    found = manifest(
        placed=[
            {"kind": kind, "name": place, "place": place, "member": f"inputs/m{i}", "hash": "0a1b", "size": len(text)}
            for i, (place, (kind, text)) in enumerate((placed or {}).items())
        ],
        wheels={
            name: {"version": version, "member": f"wheels/{member}", "extras": [], "first_party": True}
            for member, (name, version, _) in (wheels or {}).items()
        },
        packages=packages or {},
    )
    write_pack(file, found, members)
    return file


PLAIN = {EVIL: ("evil", "1.0", wheel(PLUGIN))}


def opened(file: Path) -> Contents:
    return read_contents(open_pack(file))


def rerun(file: Path, into: Path, *options: str) -> list[str]:
    """The codes with which the command refuses; none where it would have run."""
    error = invoke(rerun_command.command, [str(file), "--into", str(into), "-q", *options]).exception
    return error.codes if isinstance(error, ConfigError) else []


@pytest.fixture
def ran(monkeypatch: Patch) -> list[Any]:
    """Collects attempts to install or run; none of them happens."""
    found: list[Any] = []
    monkeypatch.setattr(rerun_command, "make_environment", lambda *args, **_: found.append(args))
    monkeypatch.setattr(rerun_command.Rerun, "outcome", lambda *args: found.append(args))
    return found


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        *(("data", place) for place in ("retrain/__main__.py", "json.py", "a/b.py", "x.so", "x.abi3.so", "e.pth")),
        *(("data", place) for place in ("x.pyw", "X.PY", "__pycache__/a.pyc", "sitecustomize.py", "a.egg", "a.pyd")),
        *(("code", place) for place in ("retrain/__main__.py", "retrain_sepa/x.py", "json.py", "JSON.py")),
        *(("code", place) for place in ("sitecustomize.py", "usercustomize/__init__.py", "a/__pycache__/b.pyc")),
        *(("model", place) for place in ("retrain/__init__.py", "json.cpython-311-x86_64-linux-gnu.so")),
        *(("code", place) for place in ("x.dist-info/entry_points.txt", "a/x.egg-info/PKG-INFO")),
        *(("data", place) for place in (".env", ".git/config", "a/.hidden", "evil.dist-info/METADATA")),
    ],
)
def test_a_file_that_would_run_or_be_obeyed_unlisted_is_refused(tmp_path: Path, kind: str, place: str) -> None:
    assert refused(opened, pack(tmp_path, placed={place: (kind, "x")})) == ["pack.bad-manifest"]
    honest = {"data": ("sums.jsonl", "retrain/sums.jsonl", "python.parquet"), "code": ("plugins/json.py", "agent.sh")}
    files = {place: (kind, "x") for kind, places in honest.items() for place in places}
    assert opened(pack(tmp_path, placed={**files, "models/x/modeling_x.py": ("model", "x")}))


OTHER_NAME = METADATA.replace("evil", "numpy")
FOREIGN = ("evil-1.0.data/scripts/python", "evil-1.0.data/purelib/retrain/__main__.py", "evil.pth", "evil/x.pyc")
FOREIGN += ("sitecustomize.py", "retrain/__main__.py", "retrain_sepa.py", "json.py")
HOSTILE: dict[str, tuple[str, Files]] = {
    **{path: ("pack.foreign-file", {**PLUGIN, path: "x"}) for path in FOREIGN},
    "a name that leaves": ("pack.unsafe-name", {**PLUGIN, "../evil.py": "x"}),
    "an absolute name": ("pack.unsafe-name", {**PLUGIN, "/tmp/evil.py": "x"}),
    "two names in one": ("pack.double-name", {**PLUGIN, "evil/A.py": "x", "evil/a.py": "y"}),
    "the metadata of another": ("pack.wheel-name-differs", {**PLUGIN, f"{INFO}/METADATA": OTHER_NAME}),
    "another version": ("pack.wheel-name-differs", {**PLUGIN, f"{INFO}/METADATA": METADATA.replace("1.0", "2.0")}),
    "two names": ("pack.wheel-name-differs", {**PLUGIN, f"{INFO}/METADATA": f"Name: numpy\n{METADATA}"}),
    "a second distribution": ("pack.not-a-wheel", {**PLUGIN, "numpy-1.0.dist-info/METADATA": METADATA}),
    "no metadata": ("pack.not-a-wheel", {name: text for name, text in PLUGIN.items() if "METADATA" not in name}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_wheel_that_holds_more_than_its_modules_is_refused(tmp_path: Path, name: str) -> None:
    code, files = HOSTILE[name]
    assert refused(check_wheels, opened(pack(tmp_path, wheels={EVIL: ("evil", "1.0", wheel(files))}))) == [code]


@pytest.mark.parametrize(
    ("file", "name", "content", "code"),
    [
        (EVIL, "evil", wheel(PLUGIN, record={"evil/__init__.py": "sha256=AAAA"}), "pack.not-as-listed"),
        (EVIL, "evil", wheel(PLUGIN, record={"evil/__init__.py": ""}), "pack.not-as-listed"),
        (EVIL, "other", wheel(PLUGIN), "pack.wheel-name-differs"),
        ("evil-2.0-py3-none-any.whl", "evil", wheel(PLUGIN), "pack.wheel-name-differs"),
        ("evil.whl", "evil", wheel(PLUGIN), "pack.not-a-wheel"),
        (EVIL, "evil", b"no zip", "pack.not-a-wheel"),
    ],
)
def test_name_metadata_and_record_agree(tmp_path: Path, file: str, name: str, content: bytes, code: str) -> None:
    assert refused(check_wheels, opened(pack(tmp_path, wheels={file: (name, "1.0", content)}))) == [code]


def test_two_wheels_with_one_module_are_refused(tmp_path: Path) -> None:
    other = {name.replace(INFO, "more-1.0.dist-info"): text for name, text in PLUGIN.items()}
    other["more-1.0.dist-info/METADATA"] = METADATA.replace("Name: evil", "Name: more")
    both = PLAIN | {"more-1.0-py3-none-any.whl": ("more", "1.0", wheel(other, info="more-1.0.dist-info"))}
    assert refused(check_wheels, opened(pack(tmp_path, wheels=both))) == ["pack.module-twice"]


def sepa(change: Callable[[dict[str, bytes]], object]) -> dict[str, tuple[str, str, bytes]]:
    """The wheel of retrain-sepa as it is installed here, with a change and a RECORD that agrees."""
    made = wheel_of("retrain-sepa", versions_of(["retrain-sepa"])["retrain-sepa"], {"retrain_sepa"})
    with zipfile.ZipFile(io.BytesIO(made.content)) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}
    change(files)
    info = next(name.partition("/")[0] for name in files if ".dist-info/" in name)
    version = info.removesuffix(".dist-info").partition("-")[2]
    return {made.file: ("retrain-sepa", version, wheel(files, info=info))}


def _append(file: str, more: bytes) -> Callable[[dict[str, bytes]], None]:
    """A change that adds to a file of the metadata."""

    def change(files: dict[str, bytes]) -> None:
        files[next(path for path in files if path.endswith(f".dist-info/{file}"))] += more

    return change


CHANGES: dict[str, Callable[[dict[str, bytes]], object]] = {
    "changed": lambda files: files.update({"retrain_sepa/__init__.py": b"import os\n"}),
    "added": lambda files: files.update({"retrain_sepa/more.py": b"import os\n"}),
    "removed": lambda files: files.pop("retrain_sepa/plugin.py"),
    "entry point": _append("entry_points.txt", b"\n[console_scripts]\npython = retrain_sepa:main\n"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_altered_wheel_of_retrain_runs_only_with_its_hash(tmp_path: Path, ran: list[Any], name: str) -> None:
    file = pack(tmp_path, wheels=sepa(CHANGES[name]))
    (checked,) = check_wheels(opened(file))
    assert "UNKNOWN" in "\n".join(listing(opened(file), [checked], here=False))
    for trusted in ([], ["--trust", checked.sha256[:-1]]):
        assert rerun(file, tmp_path / "x", "--yes", *trusted) == ["rerun.unknown-retrain"]
    assert (ran, (tmp_path / "x").exists()) == ([], False)
    rerun(file, tmp_path / "x", "--yes", "--trust", checked.sha256)
    assert ran


def test_a_known_wheel_runs_and_without_consent_nothing_does(tmp_path: Path, ran: list[Any]) -> None:
    plain = pack(tmp_path, wheels=PLAIN)
    for options in ([], ["--here"], ["--trust", "0" * 64], ["--other-builds"]):
        assert rerun(plain, tmp_path / "x", *options) == ["rerun.consent-needed"]
    assert (ran, (tmp_path / "x").exists()) == ([], False)
    described = _append("METADATA", b"\nRequires-Dist: worse @ file:///tmp/worse\n")
    file = pack(tmp_path, wheels=sepa(described))
    (checked,) = check_wheels(opened(file))
    assert (checked.is_ours, checked.changed) == (True, ())
    rerun(file, tmp_path / "x", "--yes")
    assert ran


CONFIG = """
[model]
model = "someone/some-model"
trust_remote_code = true
[environment]
provider = "agent"
args = { command = "python agent.py --fast" }
auto_install = true
[judge]
base_url = "https://user:secret@evil.example:8443/v1?x=1"
api_key_env = "MY_KEY"
[reward]
type = "os.system"
[data]
path = "/etc/passwd"
also = ["a/../../b", "sums.jsonl"]
"""


def test_the_listing_names_code_hosts_programs_variables_and_places(tmp_path: Path) -> None:
    placed = {"plugins/halved.py": ("code", "y"), "models/m/modeling.py": ("model", "z"), "sums.jsonl": ("data", "{}")}
    packages = {"numpy": {"version": "2.0", "digest": "0123456789abcdef" * 2}}
    contents = opened(pack(tmp_path, placed=placed, wheels=PLAIN, packages=packages, config=CONFIG))
    checked = check_wheels(contents)
    shown = "\n".join(listing(contents, checked, here=False))
    for part in (
        "plugins/halved.py (1 bytes, hash 0a1b)", "models/m/modeling.py", "download someone/some-model",
        "program  python agent.py --fast", "connects https://evil.example:8443 (judge.base_url)", "variable MY_KEY",
        "outside  /etc/passwd", "outside  a/../../b", "imports  os.system (reward.type)", "model.trust_remote_code",
        f"plugin   evil 1.0, from the pack, sha256 {checked[0].sha256}", "numpy 2.0 (0123456789ab)",
    ):  # fmt: skip
        assert part in shown
    assert not any(part in shown for part in ("secret", "sums.jsonl"))
    assert "nothing is installed" in "\n".join(listing(contents, (), here=True))
    lay_out(contents, _unpacked(contents, tmp_path), tmp_path, {})
    assert "auto_install = false" in (tmp_path / "config.toml").read_text()
    tiny = pack(tmp_path, config='[model]\nmodel = "builtin:tiny"\n')
    assert "builtin:tiny" not in "\n".join(listing(opened(tiny), (), here=True))


UNDOING = ('"environment.auto_install" = true', 'recorders = ["wandb"]', 'logging = { wandb_project = "x" }')


@pytest.mark.parametrize("condition", [*UNDOING, 'adapter_path = "/x"'])
def test_a_condition_cannot_undo_what_a_rerun_sets(tmp_path: Path, ran: list[Any], condition: str) -> None:
    file = pack(tmp_path, config=f"[[campaign.conditions]]\n{condition}\n")
    assert rerun(file, tmp_path / "x", "--yes", "--here") == ["rerun.condition-sets-key"]
    assert (ran, (tmp_path / "x").exists()) == ([], False)


def _unpacked(contents: Contents, folder: Path) -> Path:
    contents.opened.unpack(folder / "unpacked")
    return folder / "unpacked"


def test_the_processes_of_a_rerun_load_the_plugins_of_the_pack_and_obey_no_repository(tmp_path: Path) -> None:
    contents = opened(pack(tmp_path, wheels=PLAIN))
    (checked,) = check_wheels(contents)
    assert (checked.modules, checked.is_ours) == ({"evil"}, False), "its manifest says first_party"
    given = {"RETRAIN__TRAINING__LR": "1", "RETRAIN_PLUGINS": "x", "PYTHONPATH": "/tmp", "MY_TOKEN": "t", "HOME": "/h"}
    environ = environ_of(contents, (), given)
    assert environ["RETRAIN_PLUGINS"] == "evil"
    assert (environ["GIT_CONFIG_KEY_0"], environ["GIT_CONFIG_VALUE_0"]) == ("safe.bareRepository", "explicit")
    assert not {"RETRAIN__TRAINING__LR", "PYTHONPATH", "MY_TOKEN"} & set(environ)


class Pip:
    """Stands in for the processes that make an environment; a download brings the given wheels."""

    def __init__(self, brings: Mapping[str, bytes]) -> None:
        self.brings, self.commands = brings, list[list[str]]()

    def __call__(self, command: list[str], environ: Mapping[str, str]) -> None:
        self.commands.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)
        if "download" in command:
            for name, content in self.brings.items():
                Path(command[command.index("--dest") + 1], name).write_bytes(content)


def installed(tmp_path: Path, monkeypatch: Patch, brings: Mapping[str, bytes], digest: str, **options: bool) -> Pip:
    """A pack that lists `pkg 1.0` and the plugin `evil`, installed with a pip that brings these wheels."""
    pip = Pip(brings)
    monkeypatch.setattr(environment, "_run", pip)
    packages = {"pkg": {"version": "1.0+cpu", "digest": digest}}
    contents = opened(pack(tmp_path, wheels=PLAIN, packages=packages))
    checked, unpacked = check_wheels(contents), _unpacked(contents, tmp_path)
    arguments = {"other_builds": False, **options}
    environment.make_environment(contents, checked, unpacked, tmp_path / "e", os.environ, lambda _: None, **arguments)
    return pip


PKG = "pkg-1.0.dist-info"
PACKAGE = {
    "pkg/__init__.py": "x = 2\n",
    "pkg-1.0.data/scripts/pkg": "#!python\n",
    f"{PKG}/METADATA": METADATA.replace("evil", "pkg"),
    f"{PKG}/WHEEL": WHEEL,
}
LINE = base64.urlsafe_b64encode(hashlib.sha256(b"x = 2\n").digest()).rstrip(b"=").decode()
DIGEST = hashlib.sha256(f"pkg/__init__.py\0{LINE}\n".encode()).hexdigest()[:32]
GOOD = {"pkg-1.0-py3-none-any.whl": wheel(PACKAGE, info=PKG)}


def test_only_listed_wheels_are_installed_and_by_hash(tmp_path: Path, monkeypatch: Patch) -> None:
    pip = installed(tmp_path, monkeypatch, GOOD, DIGEST)
    _, download, install = pip.commands
    for command in (download, install):
        assert {"--no-deps", "--only-binary", "-I"} <= set(command)
        assert command[command.index("--only-binary") + 1] == ":all:"
        assert not {"--find-links", "--extra-index-url", "--index-url", "--constraint"} & set(command)
    assert "pkg==1.0" in download
    assert {"--require-hashes", "--no-index", "--isolated"} <= set(install)
    lines = Path(install[install.index("--requirement") + 1]).read_text().splitlines()
    assert len(lines) == 2
    assert all(line.startswith("file://") and " --hash=sha256:" in line for line in lines)


@pytest.mark.parametrize(
    ("brings", "digest", "code"),
    [
        (GOOD, "0" * 32, "rerun.other-build"),
        (GOOD, "", "rerun.other-build"),
        ({**GOOD, "more-1.0-py3-none-any.whl": wheel(PACKAGE, info=PKG)}, DIGEST, "pack.wheel-name-differs"),
        ({"pkg-1.0.tar.gz": b"x"}, DIGEST, "pack.not-a-wheel"),
        ({}, DIGEST, "rerun.wheel-not-found"),
        ({"pkg-1.0-py3-none-any.whl": wheel({**PACKAGE, "evil/x.py": ""}, info=PKG)}, DIGEST, "pack.module-twice"),
        ({"pkg-1.0-py3-none-any.whl": wheel(PACKAGE, info=PKG, record={"pkg/__init__.py": "sha256=A"})}, DIGEST,
         "pack.not-as-listed"),
    ],
)  # fmt: skip
def test_a_download_that_is_not_listed_is_not_installed(
    tmp_path: Path, monkeypatch: Patch, brings: Mapping[str, bytes], digest: str, code: str
) -> None:
    assert refused(installed, tmp_path, monkeypatch, brings, digest) == [code]


def test_another_build_is_taken_when_the_user_says_so(tmp_path: Path, monkeypatch: Patch) -> None:
    assert len(installed(tmp_path, monkeypatch, GOOD, "0" * 32, other_builds=True).commands) == 3
    found = installed_digests(["click"])["click"]
    made = wheel_of("click", found["version"], {"click"})
    read = environment.read_wheel("click", made.file, io.BytesIO(made.content))
    assert environment._digest(read) == found["digest"]


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
def test_a_name_that_could_leave_the_folder_is_refused(tmp_path: Path, code: str, members: list[Member]) -> None:
    assert refused(open_pack, hostile(tmp_path / "p", members)) == [code]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p"]


def test_a_bomb_is_refused_by_claimed_and_by_real_sizes(tmp_path: Path, monkeypatch: Patch) -> None:
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


def test_what_is_no_pack_is_refused(tmp_path: Path) -> None:
    assert refused(open_pack, tmp_path / "p") == ["pack.missing"]
    for content in (b"", b"no zip", b"PK\x03\x04" + bytes(40), b"PK\x05\x06" + bytes(18)):
        (tmp_path / "p").write_bytes(content)
        assert refused(open_pack, tmp_path / "p") == ["pack.not-a-pack"]


@given(st.text(max_size=30))
def test_a_safe_name_stays_below_its_folder(name: str) -> None:
    base, path = Path("/base"), Path("/base", name)
    assert not is_safe(name) or (path != base and path.is_relative_to(base) and ".." not in path.parts)


LISTED: list[Member] = [*MEMBERS.items(), ("f", b"x")]
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
    good = hostile(tmp_path / "good", LISTED, **manifest(hardware=hardware))
    assert read_contents(open_pack(good)).name == "n"
    bad = open_pack(hostile(tmp_path / "p", LISTED, **manifest(**changed)))
    assert refused(read_contents, bad) == ["pack.bad-manifest"]
