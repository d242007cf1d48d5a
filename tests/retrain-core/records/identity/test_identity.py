"""What is hashed, copied and compared, whatever lies under the names of a configuration."""

import json
import os
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.plugins.discover import load_plugins
from retrain.records.checkpoints import STATE
from retrain.records.identity import hashing, recorded
from retrain.records.identity.changes import changes_between, source_diff
from retrain.records.identity.collect import Identity
from retrain.records.identity.copies import copy_name, input_digests, stored_identity, write_inputs
from retrain.records.identity.hashing import Budget, hash_file
from retrain.records.identity.inputs import named_inputs
from retrain.records.places import Place
from retrain.run.check import identity_of
from retrain.run.tables import registered_tables


@pytest.fixture
def collect(load, tmp_path, monkeypatch):
    """`collect("--data-path", "rows", environ={})`: the identity of a configuration, in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def collected(*arguments, environ=None):
        plugins = load_plugins(dict(environ or {}))
        config, problems = load("", *arguments)
        assert not problems
        return identity_of(config, plugins, registered_tables(plugins))

    return collected


def names(identity, kind):
    return [file.name for file in getattr(identity, kind)]


def kept(run, identity):
    run.mkdir(exist_ok=True)
    write_inputs(run, identity)
    return stored_identity(run, {"identity": json.loads(json.dumps(identity.summary()))})


def test_everything_that_a_configuration_names_is_hashed(collect, tmp_path):
    for folder in ("rows/deep", "rows/.hidden", "rows/logs/train", "plugins"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("rows/b.jsonl", "rows/deep/a.csv", "rows/.hidden/x", "rows/logs/train/metrics.jsonl", "rubric.json"):
        (tmp_path / file).write_text(file)
    (tmp_path / "plugins/score.py").write_text("import mine_helper\n")
    (tmp_path / "mine_helper.py").write_text("")
    (tmp_path / "scorer.py").write_text("")
    arguments = ["--data-source", "files", "--data-path", "rows", "--log-dir", "rows/logs/train"]
    arguments += ["--reward-type", "score.make", "--reward-custom-module", "scorer.py"]
    arguments += ["--data-opt", "rubric=rubric.json"]
    found = collect(*arguments)
    assert names(found, "data") == ["rows/b.jsonl", "rows/deep/a.csv", "rubric.json"]
    assert sorted(names(found, "code")) == ["mine_helper.py", "plugins/score.py", "scorer.py"]
    assert {"retrain-core", "retrain-sepa"} <= found.plugins.keys()
    assert all(plugin.is_ours and plugin.files for plugin in found.plugins.values())
    assert names(collect("--data-path", "rows/*.jsonl"), "data") == ["rows/b.jsonl"]
    assert names(collect("--data-source", "hub", "--data-path", "rows/deep"), "data") == ["rows/deep/a.csv"]
    assert names(collect("--data-source", "hub", "--data-path", "openai/gsm8k"), "data") == []  # of the hub: no files
    assert names(collect("--data-path", "rows/gone.csv"), "data") == ["rows/gone.csv"]  # missing, and told so
    assert names(collect("--model", "builtin:tiny"), "model")[0] == "config.json"
    assert "retrain-sepa" not in collect(environ={"RETRAIN_BLOCK": "retrain-sepa"}).plugins


def test_of_a_run_that_gives_its_adapter_only_that_is_hashed_and_none_of_it_copied(collect, tmp_path):
    for run in ("first", "teacher"):
        folder = tmp_path / "logs" / run / "adapter/final"
        folder.mkdir(parents=True)
        for name in ("adapter_config.json", "adapter_model.safetensors", STATE):
            (folder / name).write_bytes(b"{}")
        (tmp_path / "logs" / run / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "large").mkdir()
    (tmp_path / "large/config.json").write_text("{}")
    arguments = ["--adapter", "logs/first", "--teacher-adapter", "logs/teacher", "--teacher-model", "large"]
    identity = collect("--model", "no/such", *arguments)
    expected = {f"logs/{run}/{name}" for run in ("first", "teacher") for name in os.listdir(folder)}
    assert set(names(identity, "model")) == expected | {"large/config.json"}
    assert not identity.data
    assert not any(file.content for file in identity.model)
    before = input_digests(identity.as_data())
    (folder / "adapter_model.safetensors").write_bytes(b"[]")
    assert input_digests(collect("--model", "no/such", *arguments).as_data()) != before


def test_pipes_links_and_unreadable_files_have_a_clear_outcome(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "real").write_bytes(b"\xff\0")
    (tmp_path / "link").symlink_to("real")
    problems = {"pipe": "not a regular file", "absent": "No such file", ".": "Is a directory"}
    for name, problem in {**problems, "loop": "symbolic links", "n\0ul": "null"}.items():
        found = hash_file(name, tmp_path / name, Budget())
        assert problem in found.problem
        assert not found.hash
    assert hash_file("/dev/zero", "/dev/zero", Budget()).problem == "not a regular file"
    link, real = (hash_file(name, tmp_path / name, Budget()) for name in ("link", "real"))
    assert link.hash == real.hash != ""
    odd = hash_file("\udcff", tmp_path / "\udcff", Budget())
    json.dumps(odd.as_data(), ensure_ascii=False).encode()


def test_a_large_file_is_hashed_by_size_time_and_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(hashing, "BLOCK_BYTES", 4)
    file = tmp_path / "large"
    file.write_bytes(bytes(5000))
    os.utime(file, ns=(1, 1))
    first = hash_file("large", file, Budget(), sampled_above=4000)
    assert (first.is_sampled, first.mtime_ns, first.content) == (True, 1, b"")
    for edited in (0, 4999):  # the first and the last block are among those that are hashed
        content = bytearray(5000)
        content[edited] = 1
        file.write_bytes(content)
        os.utime(file, ns=(1, 1))
        assert hash_file("large", file, Budget(), sampled_above=4000).hash != first.hash
    assert not hash_file("large", file, Budget(), sampled_above=5000).is_sampled
    os.utime(file, ns=(3, 3))
    touched = hash_file("large", file, Budget(), sampled_above=4000)
    os.utime(file, ns=(1, 1))
    before = Identity(data=(hash_file("large", file, Budget(), sampled_above=4000),)).as_data()
    (change,) = changes_between(before, Identity(data=(touched,)).as_data())
    assert "another modification time" in str(change)
    assert changes_between(before, before) == []
    spent = Budget(whole=10, blocks=0)
    file.write_bytes(bytes(5000))
    os.utime(file, ns=(2, 2))
    assert hash_file("large", file, spent).mtime_ns == 2


def test_copies_hold_no_secret_and_a_hidden_line_is_not_shown(collect, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "sk-planted-0123456789")
    file = tmp_path / "scorer.py"
    file.write_text("KEY = 'sk-planted-0123456789'\napi_key = 'other-planted-987'\nx = 1\n")
    before = kept(tmp_path / "run", collect("--reward-type", "custom", "--reward-custom-module", "scorer.py"))
    copied = "".join(each.read_text() for each in (tmp_path / "run").rglob("*") if each.is_file())
    assert "planted" not in copied
    monkeypatch.delenv("JUDGE_API_KEY")
    file.write_text("KEY = 'sk-planted-0123456788'\napi_key = 'other-planted-986'\nx = 2\n")
    now = collect("--reward-type", "custom", "--reward-custom-module", "scorer.py").as_data()
    (change,) = changes_between(before, now)
    assert (change.line, change.before, change.now) == (3, "x = 1", "x = 2")
    assert "planted" not in str(change) + "".join(source_diff(change, before, now))


def test_many_changes_are_counted_and_files_that_come_go_or_break_are_named(collect, tmp_path):
    (tmp_path / "rows").mkdir()
    for number in range(20):
        (tmp_path / f"rows/{number:02}.jsonl").write_text("{}\n")
    arguments = ("--data-path", "rows")
    before = kept(tmp_path / "run", collect(*arguments))
    assert changes_between(before, collect(*arguments).as_data()) == []
    assert input_digests(before) == input_digests(collect(*arguments).summary())
    (tmp_path / "rows/00.jsonl").unlink()
    (tmp_path / "rows/01.jsonl").unlink()
    os.mkfifo(tmp_path / "rows/01.jsonl")
    (tmp_path / "rows/015.jsonl").write_text("new")
    for number in range(2, 20):
        (tmp_path / f"rows/{number:02}.jsonl").write_text("{}\n[]\n")
    now = collect(*arguments)
    told = [str(change) for change in changes_between(before, now.as_data())]
    assert told[:3] == [
        "rows/00.jsonl is no longer part of the run",
        "rows/01.jsonl cannot be read now: not a regular file",
        "rows/015.jsonl was not part of the run",
    ]
    assert told[3] == "rows/02.jsonl:2 changed: '' is now '[]'"
    assert told[-1] == "data changed in 13 more files"
    assert input_digests(before) != input_digests(now.summary())
    (tmp_path / "run/inputs/files.json").write_text("[]")
    former = stored_identity(tmp_path / "run", {"identity": json.loads(json.dumps(collect().summary()))})
    (change,) = changes_between(former, now.as_data())
    assert "inputs/files.json" in str(change)
    assert changes_between({}, now.as_data()) == []


def test_one_file_has_its_own_digest_and_several_that_of_names_and_contents():
    assert recorded.digest_of({"any name": "1"}) == "1"
    assert recorded.digest_of({"a": "1", "b": ""}) == recorded.digest_of({}) == ""
    several = [{"a": "1", "b": "2"}, {"a": "2", "b": "1"}, {"a": "1", "c": "2"}]
    digests = {recorded.digest_of(files) for files in several}
    assert len(digests) == 3
    assert digests.isdisjoint({"", "1", "2"})
    assert recorded.digest_of({"b": "2", "a": "1"}) == recorded.digest_of(several[0])


def test_versions_of_packages_are_told_where_they_differ():
    before, now = {"packages": {"a": "1", "b": "1", "d": "3"}}, {"packages": {"a": "1", "b": "2", "c": "1"}}
    told = [(change.name, change.what) for change in changes_between(before, now)]
    news = [("b", "1", "2"), ("c", "not used", "1"), ("d", "3", "not used")]
    assert told == [(name, f"was {old} and is now {new}") for name, old, new in news]


def test_variables_change_where_both_sides_know_them():
    before = {"variables": {"KEPT": "1", "OTHER": "1", "GONE": "set", "UNSET NOW": "set"}}
    now = {"variables": {"KEPT": "1", "OTHER": "2", "NEW": "set", "UNSET NOW": "not set"}}
    told = {change.name.removeprefix("environment variable "): change.what for change in changes_between(before, now)}
    assert list(told) == ["OTHER", "UNSET NOW"]
    assert told["UNSET NOW"] == "was set and is no longer"
    all_listed = {"variables": {"*": "*", "NEW": "set"}}
    assert [change.what for change in changes_between(all_listed, {"variables": {"GONE": "set", "*": "*"}})] == [
        "is set now",
        "was set and is no longer",
    ]
    assert changes_between(before, {}) == changes_between({}, before) == []


@pytest.mark.parametrize("damage", [{"identity": []}, {"identity": {"code": 3, "plugins": [1], "packages": 7}}, {}])
def test_a_damaged_record_gives_no_traceback(damage, collect, tmp_path):
    now = collect().as_data()
    for stored in (stored_identity(tmp_path, damage), {**now, "data": None}):
        changes_between(stored, now)
        changes_between(now, stored)
        input_digests(stored)


def test_our_own_distributions_and_those_that_come_or_go_are_told_and_refuse_nothing(collect, distribution, tmp_path):
    site = distribution(
        "retrain-extra", {"extra": "from retrain.api import hookimpl\n@hookimpl\ndef retrain_run_start(run): pass\n"}
    )
    before = kept(tmp_path / "run", collect())
    assert "extra.py" in before["plugins"]["retrain-extra"]["files"]
    without = collect(environ={"RETRAIN_BLOCK": "retrain-extra"}).as_data()
    assert [(str(c), c.refuses) for c in changes_between(before, without)] == [
        ("retrain-extra 1.0 is no longer loaded", False)
    ]
    now = collect().as_data()
    ours = now["plugins"]["retrain-core"]
    ours |= {"digest": "other", "files": {**ours["files"], "retrain/api.py": {"hash": "other"}}}
    (change,) = changes_between(before, now)
    assert not change.refuses
    assert str(change).startswith("retrain-core changed (first differing file: ")
    assert "retrain/api.py" in str(change)
    (site / "extra.py").write_text((site / "extra.py").read_text() + "# 1\n")
    (change,) = changes_between(before, collect().as_data())
    assert change.refuses
    assert change.line == 4
    assert change.owner == "retrain-extra"


HOSTILE = st.lists(st.sampled_from(["..", "/", "~", "\0", "a", "x.py", "//", "../.."]), max_size=6).map("/".join)


@settings(max_examples=100)
@given(st.one_of(st.just("code"), HOSTILE), HOSTILE)
def test_a_copy_never_lies_outside_its_folder(kind, name):
    place = copy_name(kind, name)
    assert not place.is_absolute()
    assert ".." not in place.parts
    assert os.path.normpath(place).split("/")[0] in ("code", "plugins")


def test_a_record_is_followed_where_the_value_is_still_the_recorded_one(load, plugins, monkeypatch):
    config, _ = load("[environment]\nargs = { command = 'python servers/a.py' }\n")
    follower, place = recorded.Follower(config, {}, plugins, []), partial(Place, absolute="", relative="", base="")
    for word in ("servers/a.py", "servers/b.py"):
        keys = ("environment", "args", "command", word)
        assert follower._is_followed(place(keys=keys, written=word)) is (word == "servers/a.py")
    modules = {"lib.py": {"path": "/lib/lib.py", "hash": "1"}}, {"own.py": {"path": "/run/own.py", "hash": "2"}}
    monkeypatch.setattr(recorded, "_identities", lambda records: [{"code": {"files": each}} for each in modules])
    assert follower._code(["/run"]) == {"own.py": "2"}, "the first run that imported modules of the project"
    files = {name: {"hash": name} for name in ("data/a.jsonl", "data/b.csv", "other/a.jsonl")}
    for written, found in (("data/*.jsonl", ["a.jsonl"]), ("data", ["a.jsonl", "b.csv"]), ("other/*.csv", [])):
        place_of = place(keys=("data", "path"), sort="data", written=written)
        assert list(recorded._files_of(place_of, files, [])) == found


def test_a_word_of_a_command_keeps_the_name_by_which_it_was_written(load, tables, plugins, tmp_path):
    (tmp_path / "moved.py").touch()
    config, _ = load(f"[environment]\nargs = {{ command = 'python {tmp_path}/moved.py' }}\n")
    config = replace(config, written={"environment.args": {"command": "python servers/a.py"}})
    found = {each.value: each.written for each in named_inputs(config, tables, plugins)}
    assert found[f"{tmp_path}/moved.py"] == "servers/a.py"
