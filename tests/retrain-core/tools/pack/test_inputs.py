"""Inputs of a pack: where a rerun finds and lays files, and planted secrets that are found with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from retrain.kernel.errors import ConfigError
from retrain.records.identity.collect import Identity
from retrain.records.identity.copies import FOLDER, stored_identity, write_inputs
from retrain.records.identity.hashing import Budget, hash_file
from retrain.records.identity.recorded import with_places
from retrain.tools.pack.archive import Contents, open_pack, read_contents, write_pack
from retrain.tools.pack.environment import chosen_files, lay_out
from retrain.tools.pack.inputs import Inputs, collect_inputs, hidden, leaks_in
from retrain.tools.pack.rerunning import differences
from tests.kit import packs
from tests.kit.problems import codes_in


def recorded(run: Path, data: tuple[str, Path], weights: tuple[str, Path]) -> dict[str, Any]:
    """The `run.json` of a run in `run` that read these two files."""
    identity = Identity(
        data=(hash_file(*data, Budget()),),
        model=(hash_file(*weights, Budget(), with_time=False, is_kept=False),),
    )
    run.mkdir()
    write_inputs(run, identity)
    record = {"seed": 1, "identity": identity.summary(), "config": {"data": {"path": data[0]}}}
    named = [(["data", "path"], "data", str(data[1])), (["model", "model"], "model", str(weights[1].parent))]
    entry = {"relative": "gone"}
    keys = [{**entry, "keys": keys, "sort": sort, "written": path, "absolute": path} for keys, sort, path in named]
    record["paths"] = {"keys": keys}
    (run / "run.json").write_text(json.dumps(record))
    return record


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose data and model lie far from its folder."""
    far = tmp_path / "far"
    (far / "model").mkdir(parents=True)
    (far / "sums.jsonl").write_text("one\ntwo\n")
    (far / "model/w").write_bytes(bytes(2000))
    recorded(tmp_path / "run", (str(far / "sums.jsonl"), far / "sums.jsonl"), ("w", far / "model/w"))
    return tmp_path / "run"


def packed(run: Path) -> tuple[Contents, Inputs]:
    far, record = run.parent / "far", json.loads((run / "run.json").read_text())
    identity = with_places(stored_identity(run, record), record, run)
    tables = {"data": {"path": str(far / "sums.jsonl")}, "model": {"model": f"{far}/model"}}
    found = collect_inputs({"run": identity}, tables, most_bytes=1000, hide_secrets=False)
    members = {**packs.MEMBERS, **found.members, "run/run.json": json.dumps(record).encode()}
    members["identity.json"] = json.dumps(identity).encode()
    inputs = {name: getattr(found, name) for name in ("placed", "left_out", "moved")}
    runs = [{**packs.RUN, "identity": "identity.json"}]
    write_pack(run.parent / "p", packs.manifest(runs=runs, **inputs), members)
    return read_contents(open_pack(run.parent / "p")), found


def test_a_large_file_is_found_where_the_run_had_it_or_asked_for_and_all_is_laid_inside(run: Path) -> None:
    (contents, found), far, work = packed(run), run.parent / "far", run.parent / "work"
    assert [file["name"] for file in found.left_out] == ["w"]
    chosen = chosen_files(contents, {})
    assert chosen == {"outside/1/model/w": far / "model/w"}
    contents.opened.unpack(run.parent / "pack")
    lay_out(contents, run.parent / "pack", work, chosen)
    assert (work / "outside/1/model/w").read_bytes() == bytes(2000)
    assert (work / "outside/2/sums.jsonl").read_text() == "one\ntwo\n"
    (far / "model/w").write_bytes(bytes(1999) + b"x")
    with pytest.raises(ConfigError) as missing:
        chosen_files(contents, {})
    for name in ("w", "outside/1/model/w"):
        assert chosen_files(contents, {name: run}) == {"outside/1/model/w": run}
    with pytest.raises(ConfigError) as unknown:
        chosen_files(contents, {"w": run, "other": run})
    assert codes_in(missing) + codes_in(unknown) == ["rerun.file-missing", "rerun.unknown-file"]


def test_a_row_of_a_file_that_was_moved_and_other_weights_are_named(run: Path) -> None:
    (contents, _), again = packed(run), run.parent / "again"
    contents.opened.unpack(run.parent / "pack")
    (run.parent / "rows").write_text("one\n2\n")
    (run.parent / "other").write_bytes(b"other")
    recorded(again, ("outside/2/sums.jsonl", run.parent / "rows"), ("w", run.parent / "other"))
    found = differences(contents, contents.runs[0], run.parent / "pack" / FOLDER, again, {})
    assert [each.kind for each in found] == ["data", "model"]
    assert "rows:2 changed: 'two' is now '2'" in found[0].what
    assert "other changed" in found[1].what


OPENAI = "sk-proj-" + "a1B2c3D4" * 5
PLANTED = {
    f'client = OpenAI("{OPENAI}")': "form of a key",
    "token: hf_" + "aB3" * 12: "form of a key",
    "AKIA" + "ABCD1234" * 2: "form of a key",
    "url = 'https://me:pa55w0rd@host/x'": "login",
    'api_key = "k3y-0f-s0me-service"': "written out",
    '{"prompt": "x", "hf_token": "0123456789abcdef"}': "written out",
    "SERVICE_API_KEY=abc123def456": "written out",
    "GET /x?key=abc123def456": "written out",
    "-----BEGIN RSA PRIVATE KEY-----": "form of a key",
}
ORDINARY = (
    'api_key = os.environ["OPENAI_API_KEY_2"]',
    "api_key=settings.keys.openai_1",
    "def score(api_key: str = '') -> float:",
    'stop_token = "<|im_end|>"',
    'prompt_key = "question2answer"',
    "max_tokens = 12345678",
    "see https://host.example/path?a=1",
    "api_key = (hidden)",
    'pad_token = "<pad0>"',
    'api_key = "your-own-key-goes-here"',
    "password = getpass('Password 1: ')",
)


@pytest.mark.parametrize("line", PLANTED)
def test_a_planted_secret_is_found_and_hidden(line: str) -> None:
    text = f"first\n{line}\nlast\n".encode()
    (leak,) = leaks_in("code/x.py", text)
    assert (leak.file, leak.line) == ("code/x.py", 2)
    assert PLANTED[line] in leak.what
    clean = hidden(text)
    assert not list(leaks_in("code/x.py", clean))
    assert clean.count(b"\n") == 3


@pytest.mark.parametrize("line", ORDINARY)
def test_ordinary_code_is_no_secret(line: str) -> None:
    assert not list(leaks_in("x.py", line.encode()))
    assert hidden(line.encode()) == line.encode()


def test_the_values_of_this_environment_are_found_even_in_binary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "correct horse battery")
    assert [leak.line for leak in leaks_in("x", b"\0\1 correct horse battery \0")] == [0]
    assert [leak.line for leak in leaks_in("x", b"a\nb correct horse battery")] == [2]
    assert b"horse" not in hidden(b"correct horse battery")
