"""`retrain migrate-config` in all its modes, on real files, through the installed script."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.kernel.config.load import load_config
from retrain.kernel.plugins.discover import load_plugins
from retrain.run.tables import registered_tables
from tests.kit.problems import codes_in

Command = Callable[..., Any]
OLD = '# mine\n[backend]\nbackend = "local"\nprime_rl_zmq_hwm = 10  # high water\n\n[model]\nmodel = "x"\n'
NEW = '# mine\n[backend]\nbackend = "local"\n\n[backend.options]\nzmq_hwm = 10  # high water\n\n[model]\nmodel = "x"\n'
SCRIPT = Path(sys.executable).with_name("retrain")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    file = tmp_path / "old.toml"
    file.write_text(OLD, encoding="utf-8")
    return file


def piped(tmp_path: Path, text: bytes, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [str(SCRIPT), "migrate-config", "--stdin", *arguments]
    return subprocess.run(command, cwd=tmp_path, input=text, capture_output=True, timeout=60, check=False)


def test_the_preview_is_a_patch_that_is_accepted_and_check_ends_by_what_is_left(old: Path, command: Command) -> None:
    result = command("migrate-config", "old.toml")
    assert (result.code, "-prime_rl_zmq_hwm = 10  # high water\n" in result.out) == (0, True)
    assert command("migrate-config", "old.toml", "--check").code == 1
    assert (old.read_text(), sorted(old.parent.iterdir())) == (OLD, [old])
    patch = result.out.replace(".migrated", "")
    subprocess.run(["git", "apply", "-p0", "-"], cwd=old.parent, input=patch, text=True, check=True)
    assert old.read_text() == NEW
    assert command("migrate-config", "old.toml", "--check").code == 0


def test_write_rewrites_in_place_and_the_result_loads(old: Path, command: Command) -> None:
    result = command("migrate-config", "old.toml", "--write")
    assert (result.code, result.out) == (0, "Wrote old.toml: moved prime_rl_zmq_hwm to [backend.options]\n")
    assert old.read_text() == NEW
    assert load_config(old, tables=registered_tables(load_plugins({})))[1] == []
    assert sorted(old.parent.iterdir()) == [old]


def test_the_backup_has_the_old_file_and_never_replaces_an_earlier_one(old: Path, command: Command) -> None:
    old.chmod(0o640)
    assert command("migrate-config", "old.toml", "--write", "--backup").code == 0
    backup = old.with_name("old.toml.bak")
    assert (backup.read_text(), old.read_text()) == (OLD, NEW)
    assert [file.stat().st_mode & 0o777 for file in (old, backup)] == [0o640, 0o640]
    old.write_text(OLD + "# more\n")
    result = command("migrate-config", "old.toml", "--write", "--backup")
    assert (result.code, codes_in(result.err), "old.toml.bak: " in result.err) == (2, ["migrate.file-exists"], True)
    assert (old.read_text(), backup.read_text()) == (OLD + "# more\n", OLD)


def test_write_leaves_a_file_alone_that_needs_nothing(old: Path, command: Command) -> None:
    old.write_text(NEW)
    before = old.stat().st_mtime_ns
    result = command("migrate-config", "old.toml", "--write", "--backup")
    assert (result.code, result.out) == (0, "old.toml: nothing to migrate\n")
    assert old.stat().st_mtime_ns == before
    assert sorted(old.parent.iterdir()) == [old]


def test_output_is_a_new_file_and_never_an_old_one_and_stdout_has_only_the_result(old: Path, command: Command) -> None:
    assert command("migrate-config", "old.toml", "-o", "new.toml").out.startswith("Wrote new.toml: moved ")
    assert (old.read_text(), (old.parent / "new.toml").read_text()) == (OLD, NEW)
    for target in ("new.toml", "old.toml"):
        result = command("migrate-config", "old.toml", "--output", target)
        assert (result.code, result.out, codes_in(result.err)) == (2, "", ["migrate.file-exists"])
    assert old.read_text() == OLD
    result = command("migrate-config", "old.toml", "--stdout")
    assert (result.code, result.out, result.err) == (0, NEW, "")


def test_a_pipe_goes_through_byte_by_byte(tmp_path: Path) -> None:
    done = piped(tmp_path, b"\xef\xbb\xbf" + OLD.replace("\n", "\r\n").encode(), "--stdout")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"\xef\xbb\xbf" + NEW.replace("\n", "\r\n").encode()


def test_an_empty_pipe_is_refused(tmp_path: Path) -> None:
    done = piped(tmp_path, b" \n\t\n", "--stdout")
    assert (done.returncode, done.stdout, codes_in(done.stderr.decode())) == (2, b"", ["migrate.empty-input"])


@pytest.mark.long
def test_a_pipe_is_checked_and_previewed_too(tmp_path: Path) -> None:
    assert piped(tmp_path, OLD.encode(), "--check").returncode == 1
    assert piped(tmp_path, OLD.encode()).stdout.startswith(b"--- <stdin>\n+++ <stdin>.migrated\n")
    assert piped(tmp_path, OLD.encode(), "-o", "new.toml").returncode == 0
    assert (tmp_path / "new.toml").read_text() == NEW


@pytest.mark.parametrize(
    "arguments",
    [
        ("old.toml", "--check", "--write"),
        ("old.toml", "--check", "--output", "x"),
        ("old.toml", "--check", "--stdout"),
        ("old.toml", "--write", "--output", "x"),
        ("old.toml", "--stdout", "--write"),
        ("old.toml", "--stdout", "--output", "x"),
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
    ("content", "place"),
    [(b"[backend]\nx = = 1\n", "x.toml:2: "), (b"[backend]\nx = '\xff'\n", "x.toml: ")],
)
def test_a_file_that_is_no_toml_is_an_error_with_its_line(
    tmp_path: Path, command: Command, content: bytes, place: str
) -> None:
    (tmp_path / "x.toml").write_bytes(content)
    result = command("migrate-config", "x.toml", "--write")
    assert (result.code, place in result.err) == (2, True)
    assert (tmp_path / "x.toml").read_bytes() == content


@pytest.mark.parametrize(
    ("arguments", "mode", "written", "code"),
    [
        ((), "preview", None, 0),
        (("--check",), "check", None, 1),
        (("--write", "--backup"), "write", "old.toml", 0),
        (("-o", "new.toml"), "output", "new.toml", 0),
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
        "legacy_keys": ["prime_rl_zmq_hwm"],
        "merged_backend_options": {"zmq_hwm": 10},
        "public_names": [],
        "written": written is not None,
        "output_path": written,
        "backup_path": "old.toml.bak" if "--backup" in arguments else None,
        **({"text": NEW} if mode == "stdout" else {}),
    }


def test_a_link_stays_a_link(old: Path, command: Command) -> None:
    folder = old.parent / "configs"
    folder.mkdir()
    target = old.rename(folder / "real.toml")
    old.symlink_to(Path("configs") / "real.toml")
    assert command("migrate-config", "old.toml", "--write").code == 0
    assert old.is_symlink()
    assert target.read_text() == NEW


def test_a_file_that_cannot_be_replaced_stays_as_it_was(old: Path, command: Command) -> None:
    (old.parent / ".old.toml.tmp").mkdir()  # where the new content would be gathered
    result = command("migrate-config", "old.toml", "--write")
    assert (result.code, codes_in(result.err), old.read_text()) == (2, ["migrate.unwritable"], OLD)


def test_loading_an_old_file_shows_the_block_that_migration_writes(old: Path, command: Command) -> None:
    result = command("explain", "old.toml")
    assert (result.code, "old.toml:4 [backend] prime_rl_zmq_hwm: " in result.err) == (2, True)
    block = "\n".join(line.strip() for line in result.err.partition("in their place\n")[2].splitlines())
    assert tomllib.loads(block)["backend"]["options"] == {"zmq_hwm": 10}


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
