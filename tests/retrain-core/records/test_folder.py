"""The run folder: one run at a time, nothing of an earlier run lost, no start where nothing can be written, rewinds."""

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.errors import ConfigError, RecordError, ResumeError
from retrain.records.completions import TokenRecord
from retrain.records.files import JsonLines, RunLock, digest_of, owner_of, write_folder, write_json, write_text
from retrain.records.folder import check_run_folder, check_sizes, open_run_folder, record_sizes, rewind_records
from retrain.records.record_names import FILES, token_file
from retrain.records.run import Run
from tests.kit.problems import codes_in, refused

PLACE = "[logging] log_dir (default)"
TOKENS = TokenRecord(tokens_T=np.array([3]), logprobs_T=np.array([-0.5]), advantages_T=np.array([1.0]))
HOLD = "import sys; from pathlib import Path; from retrain.records.files import RunLock\n"
HOLD += "kept = RunLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder `run`."""
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def check(log_dir, adapters=""):
    check_run_folder(str(log_dir), str(adapters), place=PLACE)


def test_a_run_writes_its_documented_files(tmp_path):
    with open_run_folder(str(tmp_path / "run"), "") as folder:
        folder.write_manifest({"status": "running"}, "[training]\n")
        folder.write_metrics({"step": -1})
        assert not (tmp_path / "run/eval.jsonl").exists()  # a run without an evaluation has none
        folder.write_evaluation([{"step": -1, "set": "held_out"}])
        folder.write_completions(0, {"step": 0}, [{"step": 0, "index": 0}, {"step": 0, "index": 1}], [TOKENS])
        folder.write_metrics({"step": 0})
        with pytest.raises(ValueError, match="JSON"):
            folder.write_metrics({"step": 1, "loss": float("nan")})
        folder.write_state({"step": 0})
        state = folder.sync()
        folder.rewrite_manifest({"status": "done"})
    assert state["record_sizes"] == {name: (tmp_path / "run" / name).stat().st_size for name in FILES}
    assert state["record_checksums"] == {name: digest_of(tmp_path / "run" / name).hexdigest() for name in FILES}
    files = {str(f.relative_to(tmp_path / "run")) for f in (tmp_path / "run").rglob("*") if f.is_file()}
    assert files == {
        *("run.json", "config.toml", "metrics.jsonl", "eval.jsonl", "trainer_state.json", ".lock"),
        *("emergence/steps.jsonl", "emergence/generations.jsonl", "emergence/tokens/step_000000.safetensors"),
        "emergence/token_files.jsonl",
    }
    assert (tmp_path / "run/metrics.jsonl").read_text() == '{"step": -1}\n{"step": 0}\n'
    assert (tmp_path / "run/emergence/steps.jsonl").read_text() == '{"step": 0}\n'
    assert json.loads((tmp_path / "run/run.json").read_text()) == {"status": "done"}


def test_records_of_earlier_runs_move_aside_one_by_one_and_other_files_stay(tmp_path):
    run = tmp_path / "logs/run"
    run.mkdir(parents=True)
    (run / "notes.txt").touch()
    for number in range(3):
        check(run)
        with open_run_folder(str(run), "") as folder:
            assert number or (run / "notes.txt").exists()
            folder.write_manifest({"number": number, "status": "done"}, "")
    kept = {path.name: json.loads((path / "run.json").read_text())["number"] for path in run.parent.iterdir()}
    assert kept == {"run.1": 0, "run.2": 1, "run": 2}


def test_an_adapter_path_and_a_tilde_are_honoured(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    check("~/run", "~/adapter")
    with open_run_folder("~/run", "~/adapter") as folder:
        assert (folder.path, folder.adapters) == (tmp_path / "run", tmp_path / "adapter")


def test_another_run_may_begin_at_the_same_time(tmp_path, monkeypatch):
    """It makes a folder beside this one's, or removes the one that both try out."""
    original, calls = tempfile.TemporaryFile, []

    def meanwhile(**given):
        calls.append(given["dir"])
        (tmp_path / "logs/other").mkdir(parents=True, exist_ok=True)
        if len(calls) == 1:
            given["dir"].rmdir()
        return original(**given)

    monkeypatch.setattr(tempfile, "TemporaryFile", meanwhile)
    check(tmp_path / "logs/run")
    assert len(calls) == 3  # run, again, and its adapters
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["other"]


def test_a_folder_of_a_living_run_is_refused_with_its_process_until_that_is_killed(holder, tmp_path):
    for attempt, where in ((lambda: check(tmp_path / "run"), PLACE), (lambda: RunLock(tmp_path / "run"), "")):
        with pytest.raises(ConfigError) as caught:
            attempt()
        assert (codes_in(caught), caught.value.problems[0].where) == (["run.folder-in-use"], where)
        assert f"process {holder.pid}" in caught.value.problems[0].what
    assert owner_of(tmp_path / "run") == holder.pid  # the refused one has not overwritten it
    (tmp_path / "run/.lock").write_text(f"{os.getpid()} another-machine\n")  # as a shared folder shows it
    assert owner_of(tmp_path / "run") == -1
    holder.kill()
    holder.wait()
    for text in ('{"status": "running", "pid": 1}', '{"status": "done"}', "[]", "not json", ""):
        (tmp_path / "run/run.json").write_text(text)
        check(tmp_path / "run")  # whatever its record says, no process holds it
    RunLock(tmp_path / "run").release()


def test_a_free_folder_has_no_owner_and_polling_keeps_no_run_out(tmp_path):
    assert owner_of(tmp_path) == owner_of(tmp_path / "nowhere") == 0
    lock = RunLock(tmp_path)
    assert owner_of(tmp_path) == os.getpid()
    lock.release()
    lock.release()
    assert owner_of(tmp_path) == 0
    RunLock(tmp_path).release()
    is_over = threading.Event()

    def look():
        while not is_over.is_set():
            owner_of(tmp_path)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for _ in range(50):
            RunLock(tmp_path).release()
    finally:
        is_over.set()
        watcher.join()


def test_a_place_that_cannot_be_written_is_a_config_error(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / ".lock").mkdir()
    blocked = [tmp_path / "file", tmp_path / "file/deeper", Path("/proc/retrain")]  # not even root may write there
    for place in blocked:
        for log_dir, adapters in ((place, ""), (tmp_path / "run", place)):
            with pytest.raises(ConfigError) as caught:
                check(log_dir, adapters)
            assert codes_in(caught) == ["run.folder-unwritable"]
            assert str(place) in caught.value.problems[0].what
    assert refused(RunLock, tmp_path) == ["run.folder-unwritable"]


@pytest.mark.parametrize("log_dir", [".", "./", "..", "../work", "../..", "/", "logs/.."])
def test_the_current_folder_is_refused_because_records_move_aside(log_dir):
    assert refused(check, log_dir) == ["run.folder-is-current"]


def write(run, content):
    for name in FILES:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(content)


@settings(max_examples=25)
@given(before=st.binary(max_size=200), after=st.binary(max_size=200))
def test_only_records_after_the_checkpoint_are_truncated(before, after, tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    write(run, before)
    sizes = record_sizes(run)
    write(run, before + after)
    for _ in range(2):
        rewind_records(run, sizes, 0)
        assert [(run / name).read_bytes() for name in FILES] == [before] * len(FILES)
    rewind_records(run, {}, 0)  # a checkpoint that knows no file was made before any was written
    assert record_sizes(run) == dict.fromkeys(FILES, 0)


def test_token_records_of_later_steps_and_torn_ones_go(tmp_path):
    write(tmp_path, b"")
    files = [token_file(tmp_path, step) for step in (0, 1, 2, 10)]
    files[0].parent.mkdir()
    for file in (*files, files[1].with_name(".step_000001.safetensors.tmp")):
        file.touch()
    rewind_records(tmp_path, record_sizes(tmp_path), 2)
    assert sorted(files[0].parent.iterdir()) == files[:2]


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_file_that_is_shorter_than_at_the_checkpoint_is_refused_before_anything_is_cut(is_gone, tmp_path):
    for name in FILES:
        write(tmp_path, b"12345")
        sizes = record_sizes(tmp_path)
        write(tmp_path, b"1234567")
        (tmp_path / name).unlink() if is_gone else (tmp_path / name).write_bytes(b"1234")
        for call in (check_sizes, lambda run, sizes: rewind_records(run, sizes, 0)):
            with pytest.raises(ResumeError) as caught:
                call(tmp_path, sizes)
            assert (codes_in(caught), caught.value.problems[0].where) == (["resume.record-cut"], str(tmp_path / name))
        assert all((tmp_path / other).read_bytes() == b"1234567" for other in FILES if other != name)


@pytest.mark.parametrize("text", [None, "", "not json", "\x00", "[]", "null", "{}", '{"seed": null, "started": ""}'])
def test_a_folder_that_is_not_a_run_is_a_resume_error(text, tmp_path):
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(ResumeError) as caught:
        Run(tmp_path).started_manifest()
    assert (codes_in(caught), caught.value.exit_code) == (["resume.no-run"], 2)


BAD = [math.nan, math.inf, -math.inf]
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text())
RECORDS = st.dictionaries(st.text(), st.one_of(LEAVES, st.lists(LEAVES), st.dictionaries(st.text(), LEAVES)))


@pytest.mark.parametrize("bad", BAD)
def test_a_file_is_replaced_as_a_whole_or_stays(bad, tmp_path):
    text, data = tmp_path / "a.txt", tmp_path / "a.json"
    write_text(text, "one")
    write_text(text, "zwei ü\n")
    write_json(data, {"x": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(data, {"x": [{"y": bad}]})
    with pytest.raises(UnicodeEncodeError):
        write_text(text, "\ud800")
    assert (text.read_text(encoding="utf-8"), json.loads(data.read_text())) == ("zwei ü\n", {"x": 1})
    assert {data, text} == {*tmp_path.iterdir()} - {tmp_path / "work"}  # no temporary file stays
    file = tmp_path / "a.jsonl"
    lines = JsonLines(file)
    lines.write([{"n": 1}])
    with pytest.raises(ValueError, match="JSON"):
        lines.write([{"n": 2}, {"n": bad}])  # keeps its whole batch out
    lines.write([{"n": 3}])
    assert file.read_text() == '{"n": 1}\n{"n": 3}\n'
    lines.close()


def test_a_folder_is_replaced_as_a_whole_or_stays(tmp_path):
    target = tmp_path / "deep" / "final"

    def first(folder):
        assert not target.exists()
        (folder / "inner").mkdir()
        (folder / "inner" / "a").write_text("1")

    def second(folder):
        assert (target / "inner" / "a").read_text() == "1"
        assert list(folder.iterdir()) == []
        (folder / "b").write_text("2")

    write_folder(target, first)
    write_folder(target, second)
    assert [path.name for path in target.iterdir()] == ["b"]
    assert [path.name for path in target.parent.iterdir()] == ["final"]
    target = tmp_path / "final"
    write_folder(target, lambda folder: (folder / "a").touch())

    def broken(folder):
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_folder(target, broken)
    assert [path.name for path in target.iterdir()] == ["a"]
    write_folder(target, lambda folder: (folder / "b").touch())
    assert [path.name for path in target.iterdir()] == ["b"]


@settings(max_examples=30)
@given(st.lists(RECORDS, max_size=5))
def test_lines_come_back_as_they_went_in(tmp_path_factory, records):
    file = tmp_path_factory.mktemp("lines") / "deep" / "a.jsonl"
    try:
        json.dumps(records, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return  # text with lone surrogates is not text
    lines = JsonLines(file)
    lines.write(records)
    lines.close()
    lines.close()
    assert [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]] == records


def test_a_file_grows_on_disk_and_one_that_cannot_be_opened_is_named(tmp_path):
    for n in range(2):
        lines = JsonLines(tmp_path / "a.jsonl")
        lines.write([{"n": n}])
        assert (tmp_path / "a.jsonl").read_text().count("\n") == n + 1
        lines.close()
    assert (tmp_path / "a.jsonl").read_text() == '{"n": 0}\n{"n": 1}\n'
    (tmp_path / "b.jsonl").mkdir()  # root may open everything else
    (tmp_path / "file").touch()
    for path in (tmp_path / "b.jsonl", tmp_path / "file" / "b.jsonl"):
        with pytest.raises(RecordError) as caught:
            JsonLines(path)
        assert (codes_in(caught), caught.value.problems[0].where) == (["record.unwritable"], str(path))
