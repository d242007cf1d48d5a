from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.api import CheckpointMode, Config, Determinism, Kind, load_plugins
from retrain.kernel.config import schema
from retrain.kernel.config.plugin_tables import InferenceTable, TeacherTable
from retrain_tinker.adapter import fetch_adapter
from retrain_tinker.backend import TinkerBackend
from retrain_tinker.plugin import CAPABILITIES, retrain_check_config
from tests.kit.shared import first_or_long
from tests.kit.tinker_rows import batch_of, drawn
from tests.kit.tinker_toy import Toy

Make = Callable[..., TinkerBackend]


def test_the_backend_is_registered_with_what_it_can_do() -> None:
    (entry,) = load_plugins().find(Kind.BACKEND, "tinker")
    assert entry.spec.traits == CAPABILITIES
    assert entry.owner.distribution == "retrain-tinker"
    assert CAPABILITIES.checkpoint_resume_mode is CheckpointMode.EXACT
    assert CAPABILITIES.determinism is Determinism.NONE
    assert not CAPABILITIES.provides_entropy


def test_registering_imports_nothing_heavy() -> None:
    code = (
        "import sys, retrain_tinker.plugin; from retrain.api import load_plugins; load_plugins(); "
        "sys.exit(str(sorted({'tinker', 'torch', 'transformers', 'httpx'} & set(sys.modules)) or ''))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stderr.strip() == ""


@pytest.mark.parametrize(
    ("backend", "inference", "refused"),
    [
        ("tinker", {}, []),
        ("tinker", {"engine": "vllm", "url": "http://127.0.0.1:1"}, ["engine", "url"]),
        ("local", {"engine": "vllm"}, []),
    ],
)
def test_sampling_keys_that_the_service_does_not_read_are_refused(
    backend: str, inference: dict[str, str], refused: list[str]
) -> None:
    tables = {
        "backend": schema.BackendTable(backend=backend),
        "lora": schema.LoraTable(),
        "inference": InferenceTable(**inference),
    }
    problems = retrain_check_config(Config(tables=tables))
    assert [problem.what.partition(" = ")[0] for problem in problems] == refused
    assert all("would have no effect" in problem.what and problem.fix for problem in problems)


@pytest.mark.parametrize("teacher", [{"model": "other"}, {"adapter": "logs/a"}, {"engine": "vllm"}, {}], ids=str)
def test_a_teacher_is_compared_at_the_temperature_that_the_service_knows(teacher: dict[str, str]) -> None:
    tables = {"backend": schema.BackendTable(backend="tinker"), "teacher": TeacherTable(**teacher)}
    told = []
    for temperature in (0.7, 1.0):
        tables["training"] = schema.TrainingTable(temperature=temperature)
        told += [problem.where for problem in retrain_check_config(Config(tables=tables))]
    assert told == (["[training] temperature (default)"] if teacher else [])


@pytest.fixture
def config(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Config(tables={"model": schema.ModelTable(model="toy/bigram", base_url=url)})


@pytest.mark.parametrize("kind", first_or_long(["adapter_path", "state_path"]))
def test_an_adapter_on_the_service_is_fetched_once(
    backend: Make, toy: Toy, config: Config, tmp_path: Path, kind: str
) -> None:
    made = backend()
    made.train(batch_of(*drawn(made)))
    made.publish()
    (tmp_path / "saved").mkdir()
    made.save(tmp_path / "saved")
    path = json.loads((tmp_path / "saved" / "tinker_state.json").read_text())[kind]
    folder = fetch_adapter(path, config)
    assert folder is not None
    wanted = (tmp_path / "saved" / "adapter_model.safetensors").read_bytes()
    assert (folder / "adapter_model.safetensors").read_bytes() == wanted
    assert json.loads((folder / "adapter_config.json").read_text())["target_modules"] == ["q_proj", "v_proj"]
    calls = len(toy.calls)
    assert fetch_adapter(path, config) == folder
    assert len(toy.calls) == calls
    assert len(list((tmp_path / "cache" / "retrain" / "tinker").iterdir())) == 1
    assert len(toy.adapters) == 1


def test_other_paths_are_left_to_others(config: Config) -> None:
    assert fetch_adapter("some/folder", config) is None


@pytest.mark.long
def test_squeeze_takes_a_tinker_path(backend: Make, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = backend()
    made.train(batch_of(*drawn(made)))
    made.publish()
    made.save(tmp_path)
    path = json.loads((tmp_path / "tinker_state.json").read_text())["adapter_path"]
    monkeypatch.setenv("TINKER_BASE_URL", url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command = [sys.executable, "-m", "retrain", "squeeze", path, "--json"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert [layer["module"].rpartition(".")[2] for layer in found["layers"]] == ["q_proj", "v_proj"]
