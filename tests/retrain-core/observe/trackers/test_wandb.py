"""Real wandb, offline, and TensorBoard: what a run leaves on disk, and that no fault of wandb stops one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.kernel.errors import ConfigError
from retrain.observe.trackers.recording import CONFIG_KEYS, named_metrics, require
from retrain.observe.trackers.tensorboard import TensorboardRecorder
from retrain.observe.trackers.wandb import WandbRecorder
from tests.kit.overlapped import lines
from tests.kit.shared import first_or_long, made_once
from tests.kit.wandb_log import read_runs

Done = subprocess.CompletedProcess[str]
SMALL = ("--seed", "1", "--batch-size", "2", "--group-size", "4", "--eval-examples", "0", "--save-every", "0")
ON = ("--max-steps", "2", "--wandb-project", "demo")
SECRET = "planted-secret-4711"
SESSIONS = """
import json, sys
from pathlib import Path
from retrain.observe.trackers.wandb import WandbRecorder

folder = Path(sys.argv[1])
manifest = json.loads((folder / "run.json").read_text())
first = WandbRecorder(artifacts=True)
assert first.state() == {}
first.start(manifest, folder)
first.step({"step": 0, "loss": 0.5})
first.checkpoint(folder / "adapter" / "final", "checkpoint_step_1")
state = json.loads(json.dumps(first.state()))
first.finish(RuntimeError("killed"))
first.finish()

second = WandbRecorder(artifacts=False)
second.restore(state)
assert second.state() == state
second.start(manifest, folder)
second.step({"step": 1, "loss": 0.25})
second.checkpoint(folder / "adapter" / "final", "final")
assert second.state() == state
second.finish()
print(state["wandb_run_id"])
"""
FAKE = """
class Settings:
    mode = "offline"
    def __init__(self, **settings): pass

class Run:
    id, dir, summary = "r1", "/x/y", {{}}
    def log(self, *a, **k): {log}
    def finish(self, **k): {finish}

class Setup:
    settings = Settings()

def setup(): return Setup
def init(**k):
    {init}
    return Run()
"""
LOGGING = """
calls, axes = [], []

class Run:
    def define_metric(self, name, step_metric=None): axes.append((name, step_metric))
"""
FINE, BROKEN = "return None", "raise OSError('the disk is on fire')"


def need(*packages: str) -> None:
    """Skip where the extras are not installed, as in `nox -s matrix`."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def clean(**environ: str) -> dict[str, str]:
    """The environment without wandb's settings, so that no test reaches a server."""
    return {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")} | environ


def train(folder: Path, *arguments: str, **environ: str) -> Done:
    """Run the real script in `folder` on the embedded model, piped."""
    script = str(Path(sys.executable).with_name("retrain"))
    environ = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", **environ}
    if not (folder / "retrain.toml").exists():
        subprocess.run([script, "init", "--template", "tiny"], cwd=folder, check=True, capture_output=True)
    return subprocess.run(
        [script, *SMALL, *arguments], cwd=folder, env=clean(**environ), capture_output=True, text=True, timeout=240
    )


@pytest.fixture
def fake_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """`fake_wandb(source)`: an installed package `wandb` of that source, for this test alone."""
    real = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "wandb"}

    def install(source: str) -> None:
        folder = tmp_path / "fake" / "wandb"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(source, encoding="utf-8")
        monkeypatch.syspath_prepend(str(folder.parent))

    yield install
    sys.modules.pop("wandb", None)
    sys.modules.update(real)


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., str]:
    """`python(source, *arguments)`: a program of its own, because wandb reads its settings once per process."""

    def run(source: str, *arguments: str, **environ: str) -> str:
        environ = clean(**{"WANDB_MODE": "offline", **environ})
        command = [sys.executable, "-c", source, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of two steps with both recorders, an evaluation before and after, and a secret in the way."""
    need("wandb", "tensorboard")
    names = ("--wandb-project", "demo", "--wandb-group", SECRET, "--wandb-tags", "first, second", "--recorders")
    wanted = ("--max-steps", "2", "--eval-examples", "4", "--eval-samples", "2")

    def make(folder: Path) -> None:
        done = train(folder, *wanted, *names, "tensorboard", MY_API_KEY=SECRET)
        assert done.returncode == 0, done.stderr
        assert "failed" not in done.stdout + done.stderr

    return made_once(tmp_path_factory, "recorded", make) / "logs" / "tiny"


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Every scalar of a run folder by step, as TensorBoard would show it."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = events.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    for tag in accumulator.Tags()["scalars"]:
        for event in accumulator.Scalars(tag):
            assert event.step not in curves[tag], f"{tag} has step {event.step} twice"
            curves[tag][event.step] = event.value
    return dict(curves)


def test_every_metric_is_in_the_row_of_its_step(recorded_run: Path) -> None:
    (run,) = read_runs(recorded_run)
    before, *steps = lines(recorded_run)
    assert (before["step"], [line["step"] for line in steps]) == (-1, [0, 1])
    assert run.rows == {
        0: named_metrics(before) | named_metrics(steps[0]) | {"train/step": 0},
        1: named_metrics(steps[1]) | {"train/step": 1},
    }
    assert run.rows[0]["train/loss"] == steps[0]["loss"]
    assert run.rows[0]["eval/correct_rate"] == before["eval_correct_rate"]
    assert run.rows[1]["eval/correct_rate"] == steps[1]["eval_correct_rate"]
    assert run.summary["eval_before/correct_rate"] == before["eval_correct_rate"]
    assert run.summary["train/loss"] == steps[1]["loss"]
    assert run.exit_code == 0


def test_name_project_tags_and_configuration_without_a_secret_in_any_file(recorded_run: Path) -> None:
    (run,) = read_runs(recorded_run)
    manifest = json.loads((recorded_run / "run.json").read_text("utf-8"))
    assert (run.proto.display_name, run.proto.project) == ("maxrl+gtpo_sepa", "demo")
    assert list(run.proto.tags) == ["first", "second"]
    assert set(CONFIG_KEYS) <= set(run.config)
    assert (run.config["seed"], run.config["condition"], run.config["lr"]) == (1, "maxrl+gtpo_sepa", 0.003)
    assert run.config["retrain"]["config"] == manifest["config"]
    assert run.proto.run_group == "(hidden)"
    files = [file for file in (recorded_run / "wandb").rglob("*") if file.is_file()]
    assert files
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []


def test_a_resumed_session_keeps_adapters(recorded_run: Path, tmp_path: Path, python: Callable[..., str]) -> None:
    run_id = python(SESSIONS, str(recorded_run), WANDB_DIR=str(tmp_path)).split()[-1]
    first, second = sorted(read_runs(tmp_path), key=lambda run: min(run.rows))
    assert first.proto.run_id == second.proto.run_id == run_id
    assert first.rows == {0: {"train/loss": 0.5, "train/step": 0}}
    assert second.rows == {1: {"train/loss": 0.25, "train/step": 1}}
    assert (first.exit_code, second.exit_code) == (1, 0)
    files = ("adapter_config.json", "adapter_model.safetensors")
    assert first.artifacts == [(f"adapter-{run_id}", "checkpoint_step_1 latest", files)]
    assert second.artifacts == []


def test_every_supervised_step_has_a_row_and_a_place(tmp_path: Path, fake_wandb: Callable[[str], None]) -> None:
    fake_wandb(FAKE.format(init="pass", log="calls.append((a[0], k))", finish=FINE).replace("class Run:", LOGGING))
    logged = {f"wandb_{name}": "" for name in ("project", "entity", "group", "run_name", "tags")}
    recorder = WandbRecorder(artifacts=False)
    recorder.start({"config": {"logging": logged, "sft": {"steps": 2}}, "condition": "c"}, tmp_path)
    for line in ({"step": -3, "sft_loss": 2.0}, {"step": -2, "sft_loss": 1.0}, {"step": -1}, {"step": 0, "loss": 0.5}):
        recorder.step(line)
    calls = sys.modules["wandb"].calls
    assert [(at["step"], at["commit"], row["train/step"]) for row, at in calls] == [
        (0, True, -3),
        (1, True, -2),
        (2, True, -1),
        (3, True, 0),
    ]
    assert [row.get("train/sft_loss") for row, _ in calls] == [2.0, 1.0, None, None]
    assert sys.modules["wandb"].axes == [("train/step", None), ("*", "train/step")]


@pytest.mark.long
def test_a_run_resumed_by_the_script_continues_in_both_recorders(tmp_path: Path) -> None:
    need("wandb", "tensorboard")
    on = ("--wandb-project", "demo", "--recorders", "tensorboard", "--checkpoint-artifacts", "true")
    for arguments in (("--max-steps", "1"), ("--max-steps", "2", "--resume", "logs/tiny")):
        done = train(tmp_path, *arguments, *on)
        assert done.returncode == 0, done.stderr
    folder = tmp_path / "logs" / "tiny"
    first, second = read_runs(folder)
    losses = {line["step"]: line["loss"] for line in lines(folder)}
    assert first.proto.run_id == second.proto.run_id
    assert {step: row["train/loss"] for step, row in (first.rows | second.rows).items()} == losses
    assert [set(run.rows) for run in (first, second)] == [{0}, {1}]
    assert scalars(folder)["train/loss"] == pytest.approx(losses)
    assert [name for run in (first, second) for name, _, _ in run.artifacts] == [f"adapter-{first.proto.run_id}"] * 2


@pytest.mark.parametrize(
    ("method", "source"),
    first_or_long(
        [
            ("start", "raise ImportError('libquantum.so.3: cannot open shared object file')"),
            ("start", FAKE.format(init=BROKEN, log=FINE, finish=FINE)),
            ("step", FAKE.format(init="pass", log=BROKEN, finish=BROKEN)),
            ("finish", FAKE.format(init="pass", log=FINE, finish=BROKEN)),
        ]
    ),
    ids=["import", "init", "log", "finish"],
)
def test_a_fault_of_wandb_is_reported_once_and_stops_nothing(
    method: str, source: str, tmp_path: Path, toy_run: Callable[..., Any], fake_wandb: Callable[[str], None]
) -> None:
    fake_wandb(source)
    result = toy_run("--wandb-project", "demo")
    assert result.code == 0, result.err
    assert result.out.count("Recorder 'wandb' failed in ") == 1
    assert f"Recorder 'wandb' failed in {method}(): " in result.out
    assert [line["step"] for line in lines(tmp_path / "logs" / "train")] == [0, 1]
    assert (tmp_path / "logs" / "train" / "adapter" / "final").is_dir()


AWAY = {"WANDB_API_KEY": "4711" * 10, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "2"}


@pytest.mark.long
@pytest.mark.parametrize(("environ", "reason"), [({}, "no API key"), (AWAY, "refused")], ids=["no-key", "no-server"])
def test_what_cannot_be_sent_is_kept_offline(environ: dict[str, str], reason: str, tmp_path: Path) -> None:
    need("wandb")
    done = train(tmp_path, *ON, WANDB_MODE="online", NETRC=str(tmp_path / "netrc"), HOME=str(tmp_path), **environ)
    assert (done.returncode, done.stdout.count("wandb works offline")) == (0, 1), done.stderr
    early = done.stdout.partition("Loading dataset")[0]
    assert ("wandb: no key for api.wandb.ai, so the run will be kept offline" in early) is (not environ)
    for part, is_shown in ((reason, True), ("wandb sync logs/tiny/wandb/offline-run-", True), ("4711", False)):
        assert (part in done.stdout + done.stderr) is is_shown
    (run,) = [run for run in read_runs(tmp_path / "logs" / "tiny") if run.rows]  # the first attempt left an empty one
    assert set(run.rows) == {0, 1}


@pytest.mark.slow
@pytest.mark.long
def test_every_number_of_every_line_is_a_scalar(recorded_run: Path) -> None:
    curves = scalars(recorded_run)
    wanted: dict[str, dict[int, float]] = {}
    for line in lines(recorded_run):
        for name, value in named_metrics(line).items():
            if not isinstance(value, str):
                wanted.setdefault(name, {})[line["step"]] = float(np.float32(value))
    assert curves == wanted
    assert set(curves["eval/correct_rate"]) == {-1, 1}
    assert set(curves["train/loss"]) == {0, 1}


@pytest.mark.slow
def test_a_line_is_on_disk_before_the_run_ends(tmp_path: Path) -> None:
    recorder = TensorboardRecorder()
    recorder.start({}, tmp_path)
    recorder.step({"step": 0, "loss": 0.5})
    assert scalars(tmp_path) == {"train/loss": {0: 0.5}}
    recorder.finish()
    recorder.finish()


@pytest.mark.slow
def test_a_resumed_session_replaces_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    first = TensorboardRecorder()
    first.start({}, tmp_path)
    first.step({"step": -1, "eval_correct_rate": 1.0})
    states = []
    for step in range(5):
        first.step({"step": step, "loss": float(step)})
        states.append(first.state())
    first.finish(KeyboardInterrupt())
    second = TensorboardRecorder()
    second.restore(states[1])
    second.start({}, tmp_path)
    second.step({"step": 2, "loss": 20.0})
    second.finish()
    assert scalars(tmp_path) == {"eval/correct_rate": {-1: 1.0}, "train/loss": {0: 0.0, 1: 1.0, 2: 20.0}}
    again = TensorboardRecorder()  # begun again in its folder: it replaces everything
    again.start({}, tmp_path)
    again.step({"step": -1, "eval_correct_rate": 2.0})
    again.finish()
    assert scalars(tmp_path) == {"eval/correct_rate": {-1: 2.0}}


def test_a_mere_folder_of_that_name_is_not_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leftover").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="not installed"):
        require("leftover", where="here")
