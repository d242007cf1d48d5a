"""One real run with both recorders, and readers of what they left on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.kit.shared import made_once
from tests.kit.wandb_log import transactions

Done = subprocess.CompletedProcess[str]
SECRET = "planted-secret-4711"
SMALL = ("--seed", "1", "--batch-size", "2", "--group-size", "4", "--eval-examples", "0", "--save-every", "0")


@dataclass(slots=True)
class WandbRun:
    """An offline run as wandb would upload it; `rows` are by step."""

    id: str = ""
    name: str = ""
    project: str = ""
    entity: str = ""
    group: str = ""
    tags: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    artifacts: list[tuple[str, str, tuple[str, ...]]] = field(default_factory=list)
    exit_code: int | None = None


def _need(*packages: str) -> None:
    """Skip where the extras are not installed, as in `nox -s matrix`."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def _clean(**environ: str) -> dict[str, str]:
    """The environment without wandb's settings, so that no test reaches a server."""
    return {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")} | environ


def _train(folder: Path, *arguments: str, **environ: str) -> Done:
    """Run the real script in `folder` on the embedded model, piped."""
    script = str(Path(sys.executable).with_name("retrain"))
    environ = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", **environ}
    if not (folder / "retrain.toml").exists():
        subprocess.run([script, "init", "--template", "tiny"], cwd=folder, check=True, capture_output=True)
    return subprocess.run(
        [script, *SMALL, *arguments], cwd=folder, env=_clean(**environ), capture_output=True, text=True, timeout=240
    )


@pytest.fixture(scope="session")
def train() -> Callable[..., Done]:
    """`train(folder, "--max-steps", "2", WANDB_MODE="offline")`: a run of the real script."""
    return _train


@pytest.fixture
def toy_run(command: Callable[..., Any], toys: Path, tokenizer_folder: Path, tmp_path: Path) -> Callable[..., Any]:
    """`toy_run("--recorders", "x")`: two steps of the toy policy in this process; its records are in `logs/train`."""
    base = ["--model", str(tokenizer_folder), "--backend", "toy", "--data-source", "toy", "--reward-type", "toy"]
    base += ["--max-steps", "2", "--batch-size", "2", "--group-size", "4", "--max-tokens", "3", "--seed", "1"]
    base += ["--advantage-mode", "grpo", "--transform-mode", "toy_flat", "--uncertainty-kind", "toy_nll"]
    return lambda *arguments: command(*base, "--data-instruction", "", "--temperature", "1.0", *arguments)


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
        environ = _clean(**{"WANDB_MODE": "offline", **environ})
        command = [sys.executable, "-c", source, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of two steps with both recorders, an evaluation before and after, and a secret in the way."""
    _need("wandb", "tensorboard")
    names = ("--wandb-project", "demo", "--wandb-group", SECRET, "--wandb-tags", "first, second", "--recorders")
    wanted = ("--max-steps", "2", "--eval-examples", "4", "--eval-samples", "2")

    def make(folder: Path) -> None:
        done = _train(folder, *wanted, *names, "tensorboard", MY_API_KEY=SECRET)
        assert done.returncode == 0, done.stderr
        assert "failed" not in done.stdout + done.stderr

    return made_once(tmp_path_factory, "recorded", make) / "logs" / "tiny"


@pytest.fixture(scope="session")
def metrics_lines() -> Callable[[Path], list[dict[str, Any]]]:
    """The lines of `metrics.jsonl` in a run folder."""
    return lambda folder: [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


@pytest.fixture(scope="session")
def read_wandb() -> Callable[[Path], list[WandbRun]]:
    """The sessions below a folder, oldest first."""
    _need("wandb")
    return lambda folder: [_read_wandb(file) for file in sorted(folder.glob("wandb/*run-*/run-*.wandb"))]


@pytest.fixture(scope="session")
def read_tensorboard() -> Callable[[Path], dict[str, dict[int, float]]]:
    """Every scalar of a run folder by step, as TensorBoard would show it."""
    _need("tensorboard")
    return _read_tensorboard


def _read_wandb(file: Path) -> WandbRun:
    """One session from its transaction log."""
    from wandb.proto.wandb_internal_pb2 import Record

    run = WandbRun()
    for content in transactions(file.read_bytes()):
        record = Record()
        record.ParseFromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            proto = record.run
            run.id, run.name, run.project = proto.run_id, proto.display_name, proto.project
            run.entity, run.group, run.tags = proto.entity, proto.run_group, tuple(proto.tags)
            run.config |= {item.key: json.loads(item.value_json) for item in proto.config.update}
        elif kind == "history":
            row = {_key(item): json.loads(item.value_json) for item in record.history.item}
            run.rows[row["_step"]] = {name: value for name, value in row.items() if not name.startswith("_")}
        elif kind == "summary":
            run.summary |= {_key(item): json.loads(item.value_json) for item in record.summary.update}
        elif kind == "artifact":
            artifact = record.artifact
            files = tuple(sorted(Path(entry.path).name for entry in artifact.manifest.contents))
            run.artifacts.append((artifact.name, " ".join(sorted(artifact.aliases)), files))
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


def _read_tensorboard(folder: Path) -> dict[str, dict[int, float]]:
    """Every scalar of a run folder by step, as TensorBoard would show it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    for tag in accumulator.Tags()["scalars"]:
        for event in accumulator.Scalars(tag):
            assert event.step not in curves[tag], f"{tag} has step {event.step} twice"
            curves[tag][event.step] = event.value
    return dict(curves)


def _key(item: Any) -> str:
    return item.key or "/".join(item.nested_key)
