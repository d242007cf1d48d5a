"""Recorders are isolated from the run; Trackio and MLflow with their own readers, and servers that are down."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pluggy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel import hooks
from retrain.kernel.config.load import TableEntry
from retrain.kernel.errors import ConfigError
from retrain.kernel.plugins.missing import install_line
from retrain.observe.trackers import mlflow as mlflow_recorder
from retrain.observe.trackers import recording
from retrain.observe.trackers.mlflow import MlflowRecorder
from retrain.observe.trackers.recording import (
    CONSTANTS,
    Recorders,
    metric_name,
    named_config,
    named_metrics,
    recorder_names,
)
from retrain.observe.trackers.trackio import TrackioRecorder
from retrain.testing import conformance
from tests.kit.overlapped import lines as lines_of
from tests.kit.problems import codes_in
from tests.kit.tables import pairs

client = pytest.mark.client
Patch = pytest.MonkeyPatch
Run = Callable[..., Any]
METRICS = {"step": 0, "loss": 0.5, "reward_my.own part?_mean": 1.0, "is_odd": True, "health": "none"}


@pytest.fixture
def trackio(tmp_path_factory: pytest.TempPathFactory, monkeypatch: Patch) -> Any:
    """The package, keeping its database in a folder of the tests; it reads the variable when it is imported."""
    if "trackio" not in sys.modules or "pytest" not in os.environ.get("TRACKIO_DIR", ""):
        os.environ["TRACKIO_DIR"] = str(tmp_path_factory.mktemp("trackio"))
    package = pytest.importorskip("trackio")
    assert "pytest" in os.environ["TRACKIO_DIR"]
    return package


def recorded(toy_run: Run, tmp_path: Path, *arguments: str) -> tuple[Any, list[Any]]:
    """Train with recorders: the manifest and the lines."""
    outcome = toy_run("--recorders", *arguments)
    assert outcome.code == 0, outcome.err
    assert "failed in" not in outcome.out + outcome.err
    assert "INFO mlflow" not in outcome.err, "nothing of theirs between our lines"
    folder = tmp_path / "logs" / "train"
    return json.loads((folder / "run.json").read_text()), lines_of(folder)


@client
def test_trackio_has_the_run_and_a_resume_continues_it(
    toy_run: Run, tmp_path: Path, trackio: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    manifest, lines = recorded(toy_run, tmp_path, '["trackio"]', "--set", 'logging.project="one"')
    (run,) = trackio.Api().runs("one")
    assert run.name == f"{manifest['condition']}_s1 {manifest['started'][:19]}"
    found = (run.config["lr"], run.config["retrain"]["python"])
    assert found == (manifest["config"]["training"]["lr"], manifest["python"])
    rows = SQLiteStorage.get_logs("one", run.name)
    bare = [{k: v for k, v in row.items() if k not in ("timestamp", "step")} for row in rows]
    assert bare == [named_metrics(line) for line in lines]
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
def test_mlflow_has_the_run_and_a_resume_continues_it(toy_run: Run, tmp_path: Path, monkeypatch: Patch) -> None:
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
def test_a_tracking_server_that_is_down_ends_nothing(toy_run: Run, monkeypatch: Patch) -> None:
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
def flaky(monkeypatch: Patch) -> Flaky:
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
def test_a_missing_package_is_told_before_anything_is_loaded(
    toy_run: Run, monkeypatch: Patch, tmp_path: Path, module: str, lacking: str
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
def test_the_recorder_conforms(name: str, tmp_path: Path, trackio: Any, monkeypatch: Patch) -> None:
    pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    checks = list(conformance("recorder", name))
    for check in checks:
        check()
    assert "goes_on_after_a_resume" in map(str, checks)


METHODS = ("start", "step", "checkpoint", "state", "restore", "finish")


class Diary:
    """Records its calls; raises in the methods named."""

    def __init__(self, *faulty: str, state: Any = None) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.faulty = faulty
        self.kept = state

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def __getattr__(self, name: str) -> Run:
        if name not in METHODS:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            if name in self.faulty:
                raise RuntimeError(f"no {name}\x1b[2J\nat all")
            return self.kept if name == "state" else None

        return call


def least(steps: list[int]) -> Any:
    """A recorder without the optional methods, which notes its steps."""
    methods = {"start": lambda *_: steps.clear(), "step": lambda metrics: steps.append(metrics["step"])}
    return SimpleNamespace(**methods, finish=lambda error=None: None)


def run(recorders: Recorders, folder: Path, steps: int = 3, error: BaseException | None = None) -> None:
    """The life of a run, through the hooks."""
    manager = pluggy.PluginManager("retrain")
    manager.add_hookspecs(hooks)
    manager.register(recorders)
    view: Any = SimpleNamespace(manifest={"seed": 1}, folder=folder)
    manager.hook.retrain_run_start(run=view)
    for step in range(steps):
        manager.hook.retrain_step_end(run=view, metrics={"step": step})
        manager.hook.retrain_save_state(run=view, folder=folder, name=f"checkpoint_step_{step}")
    manager.hook.retrain_run_end(run=view, error=error)


def state_of(recorders: Recorders) -> dict[str, Any]:
    """What a checkpoint keeps."""
    kept: dict[str, Any] = recorders.retrain_save_state("final", None)["recorders"]
    return kept


def test_every_recorder_hears_everything_in_order(tmp_path: Path) -> None:
    diary, steps = Diary(), list[int]()
    run(Recorders({"diary": diary, "least": least(steps)}), tmp_path, steps=1)
    assert diary.calls == [
        ("start", ({"seed": 1}, tmp_path)),
        ("step", ({"step": 0},)),
        ("checkpoint", (tmp_path, "checkpoint_step_0")),
        ("finish", (None,)),
    ]
    assert steps == [0]
    for error in (KeyboardInterrupt(), ValueError("x")):
        diary = Diary()
        run(Recorders({"x": diary}), tmp_path, error=error)
        assert diary.calls[-1] == ("finish", (error,))
    idle = Diary("start")
    run(Recorders({"x": idle}), tmp_path)
    assert idle.names() == ["start", "finish"], "what did not start is only finished"


@pytest.mark.parametrize("method", METHODS)
def test_a_fault_is_named_once_and_others_go_on(method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = Diary(state={"n": 1})
    recorders = Recorders({"bad one": Diary(method, state={"n": 2}), "good": good})
    with caplog.at_level(logging.WARNING, "retrain"):
        recorders.retrain_load_state({"recorders": {"bad one": {"n": 0}, "good": {"n": 0}}})
        run(recorders, tmp_path)
        assert state_of(recorders)["good"] == {"n": 1}
    (line,) = caplog.messages
    assert line.startswith(f"Recorder 'bad one' failed in {method}(): RuntimeError: no {method}")
    assert line.isprintable()
    assert good.names() == ["restore", "start", *["step", "checkpoint"] * 3, "finish", "state"]


@pytest.mark.parametrize("state", [7, {"x": float("nan")}, {"x": object()}, [1]])
def test_a_state_that_is_not_json_is_left_out_of_the_checkpoint(state: Any, caplog: pytest.LogCaptureFixture) -> None:
    recorders = Recorders(
        {"odd": Diary(state=state), "good": Diary(state={"n": (1, 2)}), "none": Diary(), "l": least([])}
    )
    assert state_of(recorders) == {"good": {"n": [1, 2]}}
    assert "Recorder 'odd' failed in state()" in caplog.text


def test_only_recorders_of_both_sessions_are_restored() -> None:
    old, new = Diary(), Diary()
    recorders = Recorders({"old": old, "new": new, "least": least([])})
    recorders.retrain_load_state({"recorders": {"old": {"n": 1}, "gone": {}, "least": {}}})
    recorders.retrain_load_state({})
    assert (old.calls, new.calls) == ([("restore", ({"n": 1},))], [])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", []),
        ("recorders = ['a', 'b', 'a']", ["a", "b"]),
        ("wandb_project = 'p'", ["wandb"]),
        ("wandb_project = 'p'\nrecorders = ['tensorboard', 'wandb']", ["wandb", "tensorboard"]),
    ],
)
def test_a_wandb_project_turns_it_on(text: str, wanted: list[str], load: Run, tables: Mapping[str, TableEntry]) -> None:
    config, problems = load(f"[logging]\n{text}\n")
    assert problems == []
    assert list(recorder_names(config)) == wanted


FIELDS = ("mean_reward", "reward_tie_groups", "backend_x", "bp_x", "eval_x", "exec_entropy_mean", "post_")


NAMES = pairs("""
    loss => loss  mean_reward => rewards/mean_reward  correct_rate => rewards/correct_rate
    running_correct_rate => rewards/running_correct_rate  reward_uniform_group_rate => rewards/uniform_group_rate
    reward_tie_eligible_groups => rewards/tie_eligible_groups
    reward_unique_fraction_mean => rewards/unique_fraction_mean  bp_p_star => backpressure/p_star
    backend_reports_sync_loss => backend/reports_sync_loss
    backend_preserves_token_advantages => backend/preserves_token_advantages
    exec_entropy_mean => entropy/exec_mean  plan_entropy_var => entropy/plan_var
    exec_surprisal_var => surprisal/exec_var  post_exec_surprisal_mean => surprisal/post_exec_mean
    post_plan_surprisal_var => surprisal/post_plan_var  post_plan_uncertainty_mean => uncertainty/post_plan_mean
    exec_surprisal_meanness => exec_surprisal_meanness  reward_length => reward_length
""")


@pytest.mark.parametrize(("field", "name"), NAMES)
def test_each_field_has_its_known_name(field: str, name: str) -> None:
    assert metric_name(field) == f"train/{name}"
    assert metric_name("eval_pass_at_4") == "eval/pass_at_4"


FIELD = st.one_of(st.from_regex(r"[a-z_]{1,12}", fullmatch=True), st.sampled_from(FIELDS))


@settings(max_examples=50)
@given(FIELD, FIELD)
def test_two_fields_never_share_a_name(one: str, other: str) -> None:
    assert (metric_name(one) == metric_name(other)) == (one == other)


def test_only_what_the_line_and_the_configuration_have_is_named() -> None:
    constants = dict.fromkeys(CONSTANTS, "x")
    line = {"step": 3, "loss": None, "mean_reward": 0.0, "sepa_gate_open": False, **constants}
    assert named_metrics(line) == {"train/rewards/mean_reward": 0.0, "train/sepa_gate_open": False}
    assert named_metrics({}) == {}
    manifest = {"seed": 7, "condition": "grpo+none", "config": {"training": {"lr": 0.1}, "gtpo": None}}
    assert named_config(manifest) == {"seed": 7, "condition": "grpo+none", "lr": 0.1}
