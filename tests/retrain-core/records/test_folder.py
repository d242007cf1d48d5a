"""The run folder: one run at a time, nothing of an earlier run lost, and no start where nothing can be written."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.kernel.errors import ConfigError
from retrain.records.completions import TokenRecord
from retrain.records.files import digest_of, owner_of
from retrain.records.folder import check_run_folder, open_run_folder
from retrain.records.record_names import FILES

PLACE = "[logging] log_dir (default)"
TOKENS = TokenRecord(tokens_T=np.array([3]), logprobs_T=np.array([-0.5]), advantages_T=np.array([1.0]))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def test_the_folder_of_runs_may_be_shared_with_one_that_starts_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tempfile.TemporaryFile

    def meanwhile(**given: Any) -> Any:
        (tmp_path / "logs" / "other").mkdir(parents=True, exist_ok=True)
        return original(**given)

    monkeypatch.setattr(tempfile, "TemporaryFile", meanwhile)
    check_run_folder(str(tmp_path / "logs" / "run"), "", place=PLACE)
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["other"]


def test_a_run_writes_its_documented_files(tmp_path: Path) -> None:
    with open_run_folder(str(tmp_path / "run"), "") as folder:
        folder.write_manifest({"status": "running"}, "[training]\n")
        folder.write_metrics({"step": -1})
        assert not (tmp_path / "run/eval.jsonl").exists()  # a run without an evaluation has none
        folder.write_evaluation([{"step": -1, "set": "held_out"}])
        folder.write_completions(0, {"step": 0}, [{"step": 0, "index": 0}, {"step": 0, "index": 1}], [TOKENS])
        folder.write_metrics({"step": 0})
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
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": -1}\n{"step": 0}\n'
    assert (tmp_path / "run" / "emergence" / "steps.jsonl").read_text() == '{"step": 0}\n'
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == {"status": "done"}


def test_metrics_that_are_refused_leave_no_line(tmp_path: Path) -> None:
    with open_run_folder(str(tmp_path / "run"), "") as folder:
        with pytest.raises(ValueError, match="JSON"):
            folder.write_metrics({"step": 0, "loss": float("nan")})
        assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""


def test_records_of_earlier_runs_move_aside_one_by_one(tmp_path: Path) -> None:
    run = tmp_path / "logs" / "run"
    for number in range(3):
        check_run_folder(str(run), "", place=PLACE)
        with open_run_folder(str(run), "") as folder:
            folder.write_manifest({"number": number, "status": "done"}, "")
    kept = {path.name: json.loads((path / "run.json").read_text())["number"] for path in run.parent.iterdir()}
    assert kept == {"run.1": 0, "run.2": 1, "run": 2}


def test_a_folder_without_records_of_a_run_stays(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    open_run_folder(str(tmp_path / "run"), "").__exit__()
    assert (tmp_path / "run" / "notes.txt").exists()


def test_a_given_adapter_path_is_honoured(tmp_path: Path) -> None:
    check_run_folder(str(tmp_path / "run"), str(tmp_path / "elsewhere"), place=PLACE)
    with open_run_folder(str(tmp_path / "run"), str(tmp_path / "elsewhere")) as folder:
        assert folder.adapters == tmp_path / "elsewhere"


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    check_run_folder("~/run", "~/adapter", place=PLACE)
    with open_run_folder("~/run", "~/adapter") as folder:
        assert (folder.path, folder.adapters) == (tmp_path / "run", tmp_path / "adapter")


def manifest(folder: Path, text: str) -> None:
    """An earlier run's `run.json`."""
    folder.mkdir()
    (folder / "run.json").write_text(text)


def test_a_folder_of_a_living_run_is_refused(tmp_path: Path) -> None:
    hold = (
        "from retrain.records.folder import open_run_folder\n"
        f"kept = open_run_folder({str(tmp_path / 'run')!r}, '')\ninput()"
    )
    process = subprocess.Popen([sys.executable, "-c", f"{hold}"], stdin=subprocess.PIPE)
    while not owner_of(tmp_path / "run"):
        time.sleep(0.05)
    with pytest.raises(ConfigError) as caught:
        check_run_folder(str(tmp_path / "run"), "", place=PLACE)
    problem = caught.value.problems[0]
    assert problem.where == PLACE
    assert f"process {process.pid}" in problem.what
    assert "--log-dir" in problem.fix
    process.kill()  # the lock goes with the process, even while nobody has asked how it ended
    while owner_of(tmp_path / "run"):
        time.sleep(0.05)
    check_run_folder(str(tmp_path / "run"), "", place=PLACE)
    process.communicate()


@pytest.mark.parametrize("text", ['{"status": "running", "pid": 1}', '{"status": "done"}', "[]", "not json", ""])
def test_a_folder_that_no_process_holds_is_free(text: str, tmp_path: Path) -> None:
    manifest(tmp_path / "run", text)
    check_run_folder(str(tmp_path / "run"), "", place=PLACE)


@pytest.mark.parametrize("blocked", ["file", "file/deeper"])
def test_a_file_in_the_way_is_a_config_error(blocked: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for log_dir, adapter in ((tmp_path / blocked, ""), (tmp_path / "run", str(tmp_path / blocked))):
        with pytest.raises(ConfigError) as caught:
            check_run_folder(str(log_dir), adapter, place=PLACE)
        assert f"cannot write {tmp_path / blocked}" in caught.value.problems[0].what


def test_a_folder_that_another_run_tries_out_at_the_same_time_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = tempfile.TemporaryFile, []

    def meanwhile(**options: Any) -> Any:
        calls.append(options["dir"])
        if len(calls) == 1:
            options["dir"].rmdir()  # which the other has made
        return original(**options)

    monkeypatch.setattr(tempfile, "TemporaryFile", meanwhile)
    check_run_folder(str(tmp_path / "run"), "", place=PLACE)
    assert len(calls) == 3  # run, again, and its adapters
    assert not (tmp_path / "run").exists()


def test_a_folder_that_the_system_refuses_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write /proc/retrain"):  # not even root may write there
        check_run_folder("/proc/retrain", "", place=PLACE)


@pytest.mark.parametrize("log_dir", [".", "./", "..", "../work", "../..", "/", "logs/.."])
def test_the_current_folder_is_refused_because_records_move_aside(log_dir: str) -> None:
    with pytest.raises(ConfigError, match="is the current folder, or holds it"):
        check_run_folder(log_dir, "", place=PLACE)
