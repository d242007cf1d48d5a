"""Trackio and MLflow: a real run read back with each package's own reader, and servers that are down."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from retrain.kernel.errors import ConfigError
from retrain.kernel.plugins.missing import install_line
from retrain.observe.trackers import mlflow as mlflow_recorder
from retrain.observe.trackers import recording
from retrain.observe.trackers.mlflow import MlflowRecorder
from retrain.observe.trackers.recording import metric_name, named_metrics
from retrain.observe.trackers.trackio import TrackioRecorder
from retrain.testing import conformance
from tests.kit.problems import codes_in

client = pytest.mark.client
METRICS = {"step": 0, "loss": 0.5, "reward_my.own part?_mean": 1.0, "is_odd": True, "health": "none"}


@pytest.fixture
def trackio(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, keeping its database in a folder of the tests; it reads the variable when it is imported."""
    if "trackio" not in sys.modules or "pytest" not in os.environ.get("TRACKIO_DIR", ""):
        os.environ["TRACKIO_DIR"] = str(tmp_path_factory.mktemp("trackio"))
    package = pytest.importorskip("trackio")
    assert "pytest" in os.environ["TRACKIO_DIR"]
    return package


def recorded(toy_run: Callable[..., Any], tmp_path: Path, *arguments: str) -> tuple[Any, list[Any]]:
    """Train with recorders: the manifest and the lines."""
    outcome = toy_run("--recorders", *arguments)
    assert outcome.code == 0, outcome.err
    assert "failed in" not in outcome.out + outcome.err
    assert "INFO mlflow" not in outcome.err, "nothing of theirs between our lines"
    folder = tmp_path / "logs" / "train"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return json.loads((folder / "run.json").read_text()), lines


@client
def test_trackio_has_what_the_run_recorded_and_a_resume_continues_it(
    toy_run: Callable[..., Any], tmp_path: Path, trackio: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    manifest, lines = recorded(toy_run, tmp_path, '["trackio"]', "--set", 'logging.project="one"')
    (run,) = trackio.Api().runs("one")
    assert run.name == f"{manifest['condition']}_s1 {manifest['started'][:19]}"
    assert run.config["lr"] == manifest["config"]["training"]["lr"]
    assert run.config["retrain"]["python"] == manifest["python"]
    rows = SQLiteStorage.get_logs("one", run.name)
    assert [{k: v for k, v in row.items() if k not in ("timestamp", "step")} for row in rows] == [
        named_metrics(line) for line in lines
    ]
    assert [row["step"] for row in rows] == [line["step"] for line in lines]
    again = TrackioRecorder()
    again.restore({"trackio_run_name": run.name})
    again.start(manifest, tmp_path)
    assert again.state() == {"trackio_run_name": run.name}
    for step in (lines[-1]["step"], lines[-1]["step"] + 1):
        again.step({"step": step, "loss": 9.0})
    again.finish(None)
    again.finish(None)
    assert capsys.readouterr().out == "", "it does not write between our lines"
    assert [row["step"] for row in SQLiteStorage.get_logs("one", run.name)] == [*[r["step"] for r in rows], 2]
    assert len(list(trackio.Api().runs("one"))) == 1


@client
def test_mlflow_has_what_the_run_recorded_and_a_resume_continues_it(
    toy_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    pytest.importorskip("sqlalchemy")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    manifest, lines = recorded(toy_run, tmp_path, '["mlflow"]')
    reader = tracking.MlflowClient(f"sqlite:///{tmp_path}/logs/train/mlflow.db")
    experiment = reader.get_experiment_by_name("retrain").experiment_id
    (run,) = reader.search_runs([experiment])
    assert (run.info.status, run.info.run_name) == ("FINISHED", manifest["condition"])
    assert run.data.params["lr"] == str(manifest["config"]["training"]["lr"])
    assert json.loads(run.data.tags["retrain.python"]) == manifest["python"]
    for name in ("loss", "mean_reward", "step_time_s"):
        history = {m.step: m.value for m in reader.get_metric_history(run.info.run_id, metric_name(name))}
        assert history == {line["step"]: line[name] for line in lines if line.get(name) is not None}, name
    again = MlflowRecorder()
    again.restore({"mlflow_run_id": run.info.run_id})
    again.start(manifest, tmp_path / "logs" / "train")
    assert again.state() == {"mlflow_run_id": run.info.run_id}
    for step in (lines[-1]["step"], lines[-1]["step"] + 1):
        again.step(METRICS | {"step": step})
    again.finish(RuntimeError())
    assert len(reader.search_runs([experiment])) == 1
    assert reader.get_run(run.info.run_id).info.status == "FAILED"
    last = {m.step: m.value for m in reader.get_metric_history(run.info.run_id, "train/loss")}
    assert last == {line["step"]: line["loss"] for line in lines if line["loss"] is not None} | {2: 0.5}
    assert [m.value for m in reader.get_metric_history(run.info.run_id, "train/reward_my.own part__mean")] == [1.0]
    assert [m.value for m in reader.get_metric_history(run.info.run_id, "train/is_odd")] == [1.0]


@client
def test_a_tracking_server_that_is_down_is_told_and_ends_nothing(
    toy_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    outcome = toy_run("--recorders", '["mlflow"]')
    assert outcome.code == 0
    assert (outcome.out + outcome.err).count("Recorder 'mlflow' failed in start(): ") == 1


class Flaky:
    """A tracking server: refuses everything while `is_down`. `recorder` sends to it."""

    def __init__(self) -> None:
        self.is_down = threading.Event()
        self.is_down.set()
        self.steps, self.status = list[int](), ""
        self.recorder = MlflowRecorder()
        self.recorder._sender = mlflow_recorder._Sender(self, "run")

    def log_batch(self, run_id: str, metrics: Any) -> None:
        if self.is_down.is_set():
            raise ConnectionError("the server is down")
        self.steps.append(metrics[0].step)

    def set_terminated(self, run_id: str, status: str) -> None:
        self.status = status


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Flaky:
    entities: Any = ModuleType("mlflow.entities")
    entities.Metric = lambda name, value, time_ms, step: SimpleNamespace(step=step)
    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setattr(mlflow_recorder, "PAUSE_S", 0.01)
    return Flaky()


def test_a_server_that_goes_away_holds_up_no_step_and_misses_none(flaky: Flaky) -> None:
    step, failures = 0, 0
    while not failures:  # the test's time limit ends a wait in vain
        try:
            flaky.recorder.step({"step": step})
        except ConnectionError:
            failures += 1
        step += 1
        time.sleep(0.005)
    flaky.is_down.clear()
    flaky.recorder.finish(None)
    assert flaky.status == "FINISHED"
    assert flaky.steps == list(range(step)), "in order, each once"
    assert not [thread for thread in threading.enumerate() if thread.name == "retrain-mlflow"]


def test_a_server_that_stays_away_ends_the_recorder_with_its_reason(flaky: Flaky) -> None:
    flaky.recorder.step({"step": 0})
    with pytest.raises(ConnectionError, match="the server is down"):
        flaky.recorder.finish(None)
    assert (flaky.steps, flaky.status) == ([], "")
    flaky.recorder.finish(None)


@pytest.mark.parametrize(
    ("module", "lacking"), [("trackio", "trackio"), ("mlflow", "mlflow"), ("mlflow", "sqlalchemy"), ("wandb", "wandb")]
)
def test_a_package_that_is_missing_is_told_before_anything_is_loaded(
    toy_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, lacking: str
) -> None:
    present = find_spec("json")
    monkeypatch.setattr(recording, "find_spec", lambda name: None if name == lacking else present)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    chosen = ("--wandb-project", "demo") if module == "wandb" else ("--recorders", f'["{module}"]')
    outcome = toy_run(*chosen)
    assert (outcome.code, codes_in(outcome.err)) == (2, ["plugin.missing-package"])
    for part in (f"recorder '{module}' needs the package '{lacking}'", install_line("retrain-core", module), chosen[0]):
        assert part in outcome.err
    assert not (tmp_path / "logs").exists()
    if lacking == "sqlalchemy":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        recording.require("mlflow", where="here")
        with pytest.raises(ConfigError):
            recording.require("mlflow", where="here", needs=("sqlalchemy",))


@client
@pytest.mark.parametrize("name", ["trackio", "mlflow"])
def test_the_recorder_conforms(name: str, tmp_path: Path, trackio: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    checks = list(conformance("recorder", name))
    for check in checks:
        check()
    assert "goes_on_after_a_resume" in map(str, checks)
