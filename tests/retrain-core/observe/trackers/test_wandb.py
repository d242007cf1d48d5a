"""Real wandb, offline: what a run leaves on disk, and that no fault of wandb stops one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.kernel.plugins.missing import install_line
from retrain.observe.trackers.recording import CONFIG_KEYS, named_metrics
from retrain.observe.trackers.wandb import WandbRecorder
from tests.kit.problems import codes_in
from tests.kit.shared import first_or_long

Train = Callable[..., subprocess.CompletedProcess[str]]
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


def test_every_metric_is_in_the_row_of_its_step(
    recorded_run: Path, read_wandb: Callable[..., Any], metrics_lines: Callable[..., Any]
) -> None:
    (run,) = read_wandb(recorded_run)
    before, *steps = metrics_lines(recorded_run)
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


def test_name_project_tags_and_configuration_without_a_secret_in_any_file(
    recorded_run: Path, read_wandb: Callable[..., Any]
) -> None:
    (run,) = read_wandb(recorded_run)
    manifest = json.loads((recorded_run / "run.json").read_text("utf-8"))
    assert (run.name, run.project, run.tags) == ("maxrl+gtpo_sepa", "demo", ("first", "second"))
    assert set(CONFIG_KEYS) <= set(run.config)
    assert (run.config["seed"], run.config["condition"], run.config["lr"]) == (1, "maxrl+gtpo_sepa", 0.003)
    assert run.config["retrain"]["config"] == manifest["config"]
    assert run.group == "(hidden)"
    files = [file for file in (recorded_run / "wandb").rglob("*") if file.is_file()]
    assert files
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []


def test_a_resumed_session_continues_the_same_run_and_keeps_adapters_if_requested(
    recorded_run: Path, tmp_path: Path, python: Callable[..., str], read_wandb: Callable[..., Any]
) -> None:
    run_id = python(SESSIONS, str(recorded_run), WANDB_DIR=str(tmp_path)).split()[-1]
    first, second = sorted(read_wandb(tmp_path), key=lambda run: min(run.rows))
    assert first.id == second.id == run_id
    assert first.rows == {0: {"train/loss": 0.5, "train/step": 0}}
    assert second.rows == {1: {"train/loss": 0.25, "train/step": 1}}
    assert (first.exit_code, second.exit_code) == (1, 0)
    files = ("adapter_config.json", "adapter_model.safetensors")
    assert first.artifacts == [(f"adapter-{run_id}", "checkpoint_step_1 latest", files)]
    assert second.artifacts == []


def test_every_supervised_step_has_a_row_and_the_axis_counts_steps(
    tmp_path: Path, fake_wandb: Callable[[str], None]
) -> None:
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
def test_a_run_resumed_by_the_script_continues_in_both_recorders(
    tmp_path: Path,
    train: Train,
    read_wandb: Callable[..., Any],
    read_tensorboard: Callable[..., Any],
    metrics_lines: Callable[..., Any],
) -> None:
    on = ("--wandb-project", "demo", "--recorders", "tensorboard", "--checkpoint-artifacts", "true")
    for arguments in (("--max-steps", "1"), ("--max-steps", "2", "--resume", "logs/tiny")):
        done = train(tmp_path, *arguments, *on)
        assert done.returncode == 0, done.stderr
    folder = tmp_path / "logs" / "tiny"
    first, second = read_wandb(folder)
    losses = {line["step"]: line["loss"] for line in metrics_lines(folder)}
    assert first.id == second.id
    assert {step: row["train/loss"] for step, row in (first.rows | second.rows).items()} == losses
    assert [set(run.rows) for run in (first, second)] == [{0}, {1}]
    assert read_tensorboard(folder)["train/loss"] == pytest.approx(losses)
    assert [name for run in (first, second) for name, _, _ in run.artifacts] == [f"adapter-{first.id}"] * 2


@pytest.mark.parametrize("arguments", [("--wandb-project", "demo"), ("--recorders", "wandb")])
def test_without_the_package_nothing_starts_and_the_install_line_is_shown(
    arguments: tuple[str, ...], tmp_path: Path, toy_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    result = toy_run(*arguments)
    assert (result.code, codes_in(result.err)) == (2, ["plugin.missing-package"])
    assert install_line("retrain-core", "wandb") in result.err
    assert arguments[0] in result.err
    assert not (tmp_path / "logs").exists()


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
    method: str,
    source: str,
    tmp_path: Path,
    toy_run: Callable[..., Any],
    fake_wandb: Callable[[str], None],
    metrics_lines: Callable[..., Any],
) -> None:
    fake_wandb(source)
    result = toy_run("--wandb-project", "demo")
    assert result.code == 0, result.err
    assert result.out.count("Recorder 'wandb' failed in ") == 1
    assert f"Recorder 'wandb' failed in {method}(): " in result.out
    assert [line["step"] for line in metrics_lines(tmp_path / "logs" / "train")] == [0, 1]
    assert (tmp_path / "logs" / "train" / "adapter" / "final").is_dir()


@pytest.mark.long
@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({}, "no API key"),
        pytest.param(
            {"WANDB_API_KEY": "4711" * 10, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "2"},
            "refused",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["no-key", "no-server"],
)
def test_what_cannot_be_sent_is_kept_offline(
    environ: dict[str, str], reason: str, tmp_path: Path, train: Train, read_wandb: Callable[..., Any]
) -> None:
    done = train(tmp_path, *ON, WANDB_MODE="online", NETRC=str(tmp_path / "netrc"), HOME=str(tmp_path), **environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Recorder 'wandb'") == 1
    early = done.stdout.partition("Loading dataset")[0]
    assert ("wandb: no key for api.wandb.ai, so the run will be kept offline" in early) is (not environ)
    assert reason in done.stdout
    assert "wandb sync logs/tiny/wandb/offline-run-" in done.stdout
    assert "4711" not in done.stdout + done.stderr
    (run,) = [run for run in read_wandb(tmp_path / "logs" / "tiny") if run.rows]  # the first attempt left an empty one
    assert set(run.rows) == {0, 1}


@pytest.mark.long
def test_a_folder_that_cannot_be_written_stops_nothing(
    tmp_path: Path, train: Train, metrics_lines: Callable[..., Any]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    done = train(tmp_path, *ON, WANDB_DIR=str(tmp_path / "file" / "below"), TMPDIR=str(tmp_path / "tmp"))
    assert done.returncode == 0, done.stderr
    assert len(metrics_lines(tmp_path / "logs" / "tiny")) == 2


@pytest.mark.long
def test_a_missing_key_is_told_before_the_data(
    tmp_path: Path, toy_run: Callable[..., Any], fake_wandb: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    fake_wandb(FAKE.format(init="pass", log=FINE, finish=FINE))
    told = "wandb: no key for api.wandb.ai, so the run will be kept offline"
    assert told in toy_run("--wandb-project", "demo", "--log-dir", "one").out.partition("Loading dataset")[0]
    monkeypatch.setenv("WANDB_API_KEY", "4711" * 10)
    assert told not in toy_run("--wandb-project", "demo", "--log-dir", "two").out
