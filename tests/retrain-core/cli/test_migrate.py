"""`retrain migrate-config`: the new content of earlier configurations, all modes, and all that must not change."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.cli.migrate import migrate
from retrain.cli.plugin import LEGACY_KEYS
from retrain.kernel.config.load import load_config
from retrain.kernel.errors import ConfigError
from retrain.kernel.plugins.discover import load_plugins
from retrain.run.tables import registered_tables
from tests.kit.problems import codes_in

OLD = """\
# my run
[backend]
backend = "local"          # which
prime_rl_transport = "zmq"    # faster here
# the port that the cluster leaves open
prime_rl_zmq_port = 5_556

[model]   # and what
model = "x"
"""
NEW = """\
# my run
[backend]
backend = "local"          # which

[backend.options]
transport = "zmq"    # faster here
# the port that the cluster leaves open
zmq_port = 5_556

[model]   # and what
model = "x"
"""
OPTIONS_OF_NEW = {"transport": "zmq", "zmq_port": 5556}


def said(text: str) -> dict[str, Any]:
    return tomllib.loads(text.removeprefix("\ufeff"))


def expected(document: dict[str, Any]) -> dict[str, Any]:
    """The content of a migrated document, computed independently of the code under test."""
    backend = dict(document.get("backend", {}))
    moved = {name.removeprefix("prime_rl_"): backend.pop(name) for name in list(backend) if name in LEGACY_KEYS}
    if moved:
        backend["options"] = {**moved, **backend.get("options", {})}
    return {**document, "backend": backend} if "backend" in document else document


def test_comments_layout_and_line_ends_stay_and_a_second_migration_changes_nothing() -> None:
    names = ("transport", "zmq_host", "zmq_port", "zmq_hwm", "strict_advantages", "sync_wait_s", "sync_poll_s")
    assert {f"prime_rl_{name}": name for name in names} == LEGACY_KEYS
    found, again = migrate(OLD, "a.toml"), migrate(NEW, "a.toml")
    assert (found.after, found.legacy_keys) == (NEW, ("prime_rl_transport", "prime_rl_zmq_port"))
    assert found.options == again.options == OPTIONS_OF_NEW
    assert (again.after, again.legacy_keys, again.diff()) == (NEW, (), "")
    for text in ("", "# nothing\n", '[model]\nmodel = "x"\n', 'backend = "local"\n', "[backend]\n"):
        assert (migrate(text, "a.toml").after, migrate(text, "a.toml").legacy_keys) == (text, ())
    # an option that is set already wins, and keeps its comment
    text = '[backend]\nprime_rl_transport = "zmq"\n# mine\n[backend.options]\ntransport = "filesystem" # it is\n'
    assert migrate(text, "a.toml").after == '[backend]\n# mine\n[backend.options]\ntransport = "filesystem" # it is\n'
    # of mixed line ends every old line keeps its own
    text = '[backend]\r\nbackend = "prime_rl"\nprime_rl_zmq_hwm = 1\r\n\r\n[model]\nmodel = "x"\r\n'
    after = migrate(text, "a.toml").after
    assert '[backend]\r\nbackend = "prime_rl"\n' in after
    assert after.endswith('[model]\nmodel = "x"\r\n')
    assert "[backend.options]\r\nzmq_hwm = 1\r\n" in after
    diff = migrate("[backend]\nprime_rl_zmq_hwm = 1", "a.toml").diff()
    assert diff.startswith("--- a.toml\n+++ a.toml.migrated\n@@ ")
    assert "-prime_rl_zmq_hwm = 1\n\\ No newline at end of file\n" in diff


@pytest.mark.parametrize(
    "text",
    [
        '[backend.options]\nzmq_port = 3\n[backend]\nprime_rl_transport = "zmq"\n',
        "[backend]\nprime_rl_zmq_port = 1\noptions = {zmq_hwm = 3}\n",
        'backend = {backend = "prime_rl", prime_rl_transport = "zmq"}\n[model]\nmodel = "x"\n',
        'backend.prime_rl_transport = "zmq"\nbackend.backend = "prime_rl"\n[model]\nmodel = "x"\n',
        '[backend]\n"prime_rl_zmq_host" = """\na\nb"""  # c\n',
        "[ backend ]\n'prime_rl_sync_wait_s'=3\n\n\n# the end",
        '[model]\nmodel = "é 模"\n[backend]\nprime_rl_zmq_host = "[backend]\\nprime_rl_zmq_hwm = 1"\n',
        '[[campaign.conditions]]\nadvantage_mode = "grpo"\n[backend]\nprime_rl_zmq_hwm = 1\n[campaign]\nseeds = [1]\n',
    ],
)
def test_every_way_to_write_the_table_is_understood(text: str) -> None:
    found = migrate(text, "a.toml")
    assert said(found.after) == expected(said(text))
    assert found.legacy_keys


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[backend\n", "a.toml:1"),
        ("[backend]\nx = 1\nx = 2\n", "a.toml:3"),
        ("[backend]\nprime_rl_zmq_hwm = 1\noptions = 3\n", "a.toml [backend] options"),
    ],
)
def test_a_file_that_cannot_be_migrated_is_refused_with_its_place(text: str, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        migrate(text, "a.toml")
    assert [problem.where for problem in caught.value.problems] == [place]


VALUES = st.one_of(st.integers(-(2**62), 2**62), st.booleans(), st.text(max_size=8), st.floats(allow_nan=False))
KEYS = st.one_of(st.sampled_from(list(LEGACY_KEYS)), st.text("abz_-é. ", min_size=1, max_size=4))
TABLES = st.dictionaries(KEYS, VALUES, max_size=5)
OPTIONS = st.dictionaries(st.sampled_from(list(LEGACY_KEYS.values())), VALUES, max_size=3)


@settings(max_examples=50)
@given(TABLES, OPTIONS | st.none(), TABLES, st.booleans())
def test_any_document_says_the_same_afterwards(
    backend: dict[str, Any], options: dict[str, Any] | None, other: dict[str, Any], windows: bool
) -> None:
    document = {"backend": {**backend, **({"options": options} if options is not None else {})}, "model": other}
    text = tomli_w.dumps(document)
    text = text.replace("\n", "\r\n") if windows else text
    assert said(migrate(text, "a.toml").after) == expected(document)


Command = Callable[..., Any]
SCRIPT = Path(sys.executable).with_name("retrain")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    file = tmp_path / "old.toml"
    file.write_text(OLD, encoding="utf-8")
    return file


def test_the_preview_is_a_patch_that_is_accepted_and_check_ends_by_what_is_left(old: Path, command: Command) -> None:
    result = command("migrate-config", "old.toml")
    assert (result.code, "-prime_rl_zmq_port = 5_556\n" in result.out) == (0, True)
    assert command("migrate-config", "old.toml", "--check").code == 1
    assert (old.read_text(), sorted(old.parent.iterdir())) == (OLD, [old])
    patch = result.out.replace(".migrated", "")
    subprocess.run(["git", "apply", "-p0", "-"], cwd=old.parent, input=patch, text=True, check=True)
    assert old.read_text() == NEW
    before = old.stat().st_mtime_ns
    assert command("migrate-config", "old.toml", "--check").code == 0
    result = command("migrate-config", "old.toml", "--write", "--backup")
    assert (result.code, result.out) == (0, "old.toml: nothing to migrate\n")
    assert (old.stat().st_mtime_ns, sorted(old.parent.iterdir())) == (before, [old])


def test_write_rewrites_in_place_and_a_backup_never_replaces_an_earlier_one(old: Path, command: Command) -> None:
    old.chmod(0o640)
    result = command("migrate-config", "old.toml", "--write", "--backup")
    assert (result.code, "moved prime_rl_transport" in result.out) == (0, True)
    backup = old.with_name("old.toml.bak")
    assert (backup.read_text(), old.read_text()) == (OLD, NEW)
    assert [file.stat().st_mode & 0o777 for file in (old, backup)] == [0o640, 0o640]
    assert load_config(old, tables=registered_tables(load_plugins({})))[1] == []
    old.write_text(OLD + "# more\n")
    result = command("migrate-config", "old.toml", "--write", "--backup")
    assert (result.code, codes_in(result.err), "old.toml.bak: " in result.err) == (2, ["migrate.file-exists"], True)
    assert (old.read_text(), backup.read_text()) == (OLD + "# more\n", OLD)


def test_output_is_a_new_file_and_never_an_old_one_and_stdout_has_only_the_result(old: Path, command: Command) -> None:
    assert command("migrate-config", "old.toml", "-o", "new.toml").out.startswith("Wrote new.toml: moved ")
    assert (old.read_text(), (old.parent / "new.toml").read_text()) == (OLD, NEW)
    for target in ("new.toml", "old.toml"):
        result = command("migrate-config", "old.toml", "--output", target)
        assert (result.code, result.out, codes_in(result.err)) == (2, "", ["migrate.file-exists"])
    assert old.read_text() == OLD
    result = command("migrate-config", "old.toml", "--stdout")
    assert (result.code, result.out, result.err) == (0, NEW, "")


def test_a_pipe_goes_through_byte_by_byte_and_an_empty_one_is_refused(tmp_path: Path) -> None:
    def piped(text: bytes, *arguments: str) -> tuple[int, bytes, bytes]:
        command = [str(SCRIPT), "migrate-config", "--stdin", *arguments]
        done = subprocess.run(command, cwd=tmp_path, input=text, capture_output=True, timeout=60, check=False)
        return done.returncode, done.stdout, done.stderr

    marked = b"\xef\xbb\xbf" + OLD.replace("\n", "\r\n").encode()
    assert piped(marked, "--stdout") == (0, b"\xef\xbb\xbf" + NEW.replace("\n", "\r\n").encode(), b"")
    code, out, err = piped(b" \n\t\n", "--stdout")
    assert (code, out, codes_in(err.decode())) == (2, b"", ["migrate.empty-input"])
    assert piped(OLD.encode(), "--check")[0] == 1


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            ("old.toml", *first, *second)
            for first, second in combinations((("--check",), ("--write",), ("--output", "x"), ("--stdout",)), 2)
        ),
        ("old.toml", "--backup"),
        ("old.toml", "--stdin"),
        ("--stdin", "--write"),
        (),
        ("missing.toml",),
        (".",),
        ("old.toml", "--chek"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error_and_writes_nothing(
    old: Path, command: Command, arguments: tuple[str, ...]
) -> None:
    result = command("migrate-config", *arguments)
    assert (result.code, result.out, len(codes_in(result.err))) == (2, "", 1)
    assert (old.read_text(), sorted(old.parent.iterdir())) == (OLD, [old])


@pytest.mark.parametrize(
    ("content", "place"), [(b"[backend]\nx = = 1\n", "x.toml:2: "), (b"[backend]\nx = '\xff'\n", "x.toml: ")]
)
def test_invalid_toml_is_an_error_with_its_line(tmp_path: Path, command: Command, content: bytes, place: str) -> None:
    (tmp_path / "x.toml").write_bytes(content)
    result = command("migrate-config", "x.toml", "--write")
    assert (result.code, place in result.err) == (2, True)
    assert (tmp_path / "x.toml").read_bytes() == content


@pytest.mark.parametrize(
    ("arguments", "mode", "written", "code"),
    [
        (("--check",), "check", None, 1),
        (("--write", "--backup"), "write", "old.toml", 0),
        (("--stdout",), "stdout", None, 0),
    ],
)
def test_json_is_alone_on_stdout_and_tells_what_was_done(
    old: Path, command: Command, arguments: tuple[str, ...], mode: str, written: str | None, code: int
) -> None:
    result = command("migrate-config", "old.toml", "--json", *arguments)
    content = json.loads(result.out)
    assert (result.code, result.err) == (code, "")
    diff = content.pop("diff")
    assert diff.startswith("--- old.toml\n")
    assert content == {
        "config": "old.toml",
        "mode": mode,
        "needs_migration": True,
        "changed": True,
        "legacy_keys": ["prime_rl_transport", "prime_rl_zmq_port"],
        "merged_backend_options": OPTIONS_OF_NEW,
        "public_names": [],
        "written": written is not None,
        "output_path": written,
        "backup_path": "old.toml.bak" if "--backup" in arguments else None,
        **({"text": NEW} if mode == "stdout" else {}),
    }


def test_a_link_stays_a_link_and_a_file_that_cannot_be_replaced_stays(old: Path, command: Command) -> None:
    (old.parent / ".old.toml.tmp").mkdir()  # where the new content would be gathered
    result = command("migrate-config", "old.toml", "--write")
    assert (result.code, codes_in(result.err), old.read_text()) == (2, ["migrate.unwritable"], OLD)
    (old.parent / ".old.toml.tmp").rmdir()
    folder = old.parent / "configs"
    folder.mkdir()
    target = old.rename(folder / "real.toml")
    old.symlink_to(Path("configs") / "real.toml")
    assert command("migrate-config", "old.toml", "--write").code == 0
    assert (old.is_symlink(), target.read_text()) == (True, NEW)


def test_loading_an_old_file_shows_the_block_that_migration_writes(old: Path, command: Command) -> None:
    result = command("explain", "old.toml")
    assert (result.code, "old.toml:4 [backend] prime_rl_transport: " in result.err) == (2, True)
    block = "\n".join(line.strip() for line in result.err.partition("in their place\n")[2].splitlines())
    assert tomllib.loads(block)["backend"]["options"] == OPTIONS_OF_NEW


PUBLIC = """\
[algorithm]
transform_mode = "entropy_mask"

[training]
batch_size = 4
clip_ratio_c = 3.0
tl_grpo = true
tl_grpo_branch_size = 4
"""


def test_names_of_the_public_package_are_told_by_cause_and_fail_the_check(tmp_path: Path, command: Command) -> None:
    (tmp_path / "public.toml").write_text(PUBLIC, encoding="utf-8")
    result = command("migrate-config", "public.toml")
    assert (result.code, result.out) == (0, "")
    assert [line for line in result.err.splitlines() if line.startswith("    ")] == [
        "    line 2 algorithm.transform_mode",
        "    line 6 training.clip_ratio_c",
        "    line 7 training.tl_grpo, 8 training.tl_grpo_branch_size",
    ]
    for option, code in (("--check", 1), ("--write", 0)):
        again = command("migrate-config", "public.toml", option)
        assert (again.code, again.out, again.err) == (code, "", result.err)
    assert (tmp_path / "public.toml").read_text() == PUBLIC
    content = json.loads(command("migrate-config", "public.toml", "--json").out)
    assert (content["needs_migration"], content["changed"], content["diff"]) == (True, False, "")
    assert [(note["path"], note["line"]) for note in content["public_names"]][1] == ("training.clip_ratio_c", 6)
    assert command("migrate-config", "public.toml", "--stdout").out == PUBLIC
