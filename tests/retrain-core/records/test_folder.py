"""The run folder: one run at a time, nothing of an earlier run lost, and no start where nothing can be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from retrain.errors import ConfigError
from retrain.records.folder import check_run_folder, open_run_folder
from retrain.records.tokens import TokenRecord

PLACE = "[logging] log_dir (default)"
TOKENS = TokenRecord(tokens_T=np.array([3]), logprobs_T=np.array([-0.5]), advantages_T=np.array([1.0]))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def living() -> Iterator[int]:
    """The process id of a process that is alive."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate()


def test_a_run_writes_its_documented_files(tmp_path: Path) -> None:
    with open_run_folder(str(tmp_path / "run"), "") as folder:
        folder.write_manifest({"status": "running"}, "[training]\n")
        folder.write_metrics({"step": -1})
        folder.write_step({"step": 0}, {"step": 0}, [{"step": 0, "index": 0}, {"step": 0, "index": 1}], [TOKENS])
        folder.write_state({"step": 0})
        saved = folder.save_adapter("final", lambda path: (path / "adapter").touch())
        folder.rewrite_manifest({"status": "done"})
    assert saved == tmp_path / "run" / "adapter" / "final"
    files = {str(f.relative_to(tmp_path / "run")) for f in (tmp_path / "run").rglob("*") if f.is_file()}
    assert files == {
        *("run.json", "config.toml", "metrics.jsonl", "trainer_state.json", "adapter/final/adapter"),
        *("emergence/steps.jsonl", "emergence/generations.jsonl", "emergence/tokens/step_000000.safetensors"),
    }
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": -1}\n{"step": 0}\n'
    assert (tmp_path / "run" / "emergence" / "steps.jsonl").read_text() == '{"step": 0}\n'
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == {"status": "done"}


def test_a_step_whose_metrics_are_refused_has_no_metrics_line(tmp_path: Path) -> None:
    with open_run_folder(str(tmp_path / "run"), "") as folder:
        with pytest.raises(ValueError, match="JSON"):
            folder.write_step({"step": 0, "loss": float("nan")}, {}, [{"index": 0}], [TOKENS])
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
        assert folder.save_adapter("final", lambda path: None) == tmp_path / "elsewhere" / "final"


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    check_run_folder("~/run", "~/adapter", place=PLACE)
    with open_run_folder("~/run", "~/adapter") as folder:
        assert (folder.path, folder.adapters) == (tmp_path / "run", tmp_path / "adapter")


def manifest(folder: Path, text: str) -> None:
    """An earlier run's `run.json`."""
    folder.mkdir()
    (folder / "run.json").write_text(text)


def test_a_folder_of_a_living_run_is_refused(tmp_path: Path, living: int) -> None:
    manifest(tmp_path / "run", json.dumps({"status": "running", "pid": living}))
    with pytest.raises(ConfigError) as caught:
        check_run_folder(str(tmp_path / "run"), "", place=PLACE)
    problem = caught.value.problems[0]
    assert problem.where == PLACE
    assert f"process {living}" in problem.what
    assert "--log-dir" in problem.fix


@pytest.mark.parametrize(
    "text",
    [
        '{"status": "done", "pid": PID}',
        '{"status": "running", "pid": 0}',
        '{"status": "running"}',
        '{"status": "running", "pid": null}',
        '{"status": "running", "pid": "x"}',
        '{"status": "running", "pid": [1]}',
        '{"status": "running", "pid": 1e300}',
        '{"status": "running", "pid": 99999999999999999999}',
        '{"status": "running", "pid": 4194303}',
        "[]",
        "not json",
        "\ufffe",
        "",
    ],
)
def test_a_folder_of_a_dead_or_unreadable_run_is_free(text: str, tmp_path: Path, living: int) -> None:
    manifest(tmp_path / "run", text.replace("PID", str(living)))
    check_run_folder(str(tmp_path / "run"), "", place=PLACE)


def test_this_very_process_may_use_its_folder_again(tmp_path: Path) -> None:
    manifest(tmp_path / "run", json.dumps({"status": "running", "pid": os.getpid()}))
    check_run_folder(str(tmp_path / "run"), "", place=PLACE)


@pytest.mark.parametrize("blocked", ["file", "file/deeper"])
def test_a_file_in_the_way_is_a_config_error(blocked: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for log_dir, adapter in ((tmp_path / blocked, ""), (tmp_path / "run", str(tmp_path / blocked))):
        with pytest.raises(ConfigError) as caught:
            check_run_folder(str(log_dir), adapter, place=PLACE)
        assert f"cannot write {tmp_path / blocked}" in caught.value.problems[0].what


def test_a_folder_that_the_system_refuses_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write /proc/retrain"):  # not even root may write there
        check_run_folder("/proc/retrain", "", place=PLACE)


@pytest.mark.parametrize("log_dir", [".", "./", "..", "../work", "../..", "/", "logs/.."])
def test_the_current_folder_is_refused_because_records_move_aside(log_dir: str) -> None:
    with pytest.raises(ConfigError, match="is the current folder, or holds it"):
        check_run_folder(log_dir, "", place=PLACE)
