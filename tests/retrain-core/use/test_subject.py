"""A name becomes the weights that it means, or an error that says what there is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from retrain.kernel.errors import BackendError, ConfigError
from retrain.records.checkpoints import save_checkpoint
from retrain.run.opened import Opened
from retrain.run.subject import SubjectKind, adapter_shape, checkpoints_of, find_subject


def make_run(folder: Path, rates: dict[str, tuple[int, float | None]], *, adapter_path: str = "") -> Path:
    """A run folder with checkpoints by name: their steps and held-out rate."""
    folder.mkdir(parents=True)
    config = {
        "backend": {"adapter_path": adapter_path},
        "model": {"model": "builtin:tiny"},
        "training": {"keep_best_metric": "eval_correct_rate"},
    }
    manifest = {"seed": 1, "started": "2026-11-23T00:00:00", "config": config}
    (folder / "run.json").write_text(json.dumps(manifest))
    adapters = Path(adapter_path) if adapter_path else folder / "adapter"
    for name, (steps, rate) in rates.items():
        metrics = {} if rate is None else {"eval_correct_rate": rate}
        state = {"next_step": steps, "progress": {"unfinished": None}, "metrics": metrics}
        save_checkpoint(adapters, name, lambda target: write_adapter(target), state)
    return folder


def write_adapter(folder: Path, **document: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    given = {"base_model_name_or_path": "builtin:tiny", "r": 8, "lora_alpha": 16} | document
    (folder / "adapter_config.json").write_text(json.dumps(given))
    return folder


RATES: dict[str, tuple[int, float | None]] = {
    "checkpoint_step_5": (5, 0.9),
    "checkpoint_step_10": (10, None),
    "final": (12, 0.7),
}


@pytest.mark.parametrize(
    ("asked", "name", "steps"),
    [
        ("", "final", 12),
        ("final", "final", 12),
        ("best", "checkpoint_step_5", 5),
        ("10", "checkpoint_step_10", 10),
        ("12", "final", 12),
        ("checkpoint_step_5", "checkpoint_step_5", 5),
    ],
)
def test_a_checkpoint_of_a_run_is_chosen(tmp_path: Path, asked: str, name: str, steps: int) -> None:
    run = make_run(tmp_path / "run", RATES)
    subject = find_subject(run, asked)
    assert (subject.kind, subject.run, subject.model) == (SubjectKind.RUN, run, "builtin:tiny")
    assert subject.folder == run / "adapter" / name
    assert (subject.checkpoint, subject.steps) == (name, steps)


def test_a_run_is_found_by_its_adapter_folder_by_a_checkpoint_and_by_its_base(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", RATES)
    assert find_subject(run / "adapter").checkpoint == "final"
    assert find_subject(run / "adapter" / "checkpoint_step_5").steps == 5
    assert find_subject(run / "adapter" / "checkpoint_step_5").run == run
    assert [each.steps for each in checkpoints_of(run)] == [5, 10, 12], "oldest first"
    base = find_subject(run, "base")
    assert (base.folder, base.model, base.checkpoint, base.steps) == (None, "builtin:tiny", "base", 0)
    other = make_run(tmp_path / "other", RATES, adapter_path=str(tmp_path / "elsewhere"))
    assert find_subject(other).folder == tmp_path / "elsewhere" / "final"


def test_an_adapter_names_its_base_and_shape(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "theirs", use_rslora=True)
    subject = find_subject(folder)
    assert (subject.kind, subject.model, subject.folder, subject.run) == ("adapter", "builtin:tiny", folder, None)
    assert adapter_shape(folder) == {"model.lora_rank": 8, "lora.alpha": 16, "lora.rslora": True, "lora.dora": False}


def test_a_name_that_is_no_folder_here_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("builtin:tiny", "gpt2", "Qwen/Qwen3-0.6B"):
        subject = find_subject(name)
        assert (subject.kind, subject.model, subject.folder) == (SubjectKind.MODEL, name, None)
    (tmp_path / "config.json").write_text("{}")
    assert find_subject(tmp_path).model == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "checkpoint", "words"),
    [
        ("run", "7", "checkpoint_step_5, checkpoint_step_10, final"),
        ("empty", "", "no checkpoint yet"),
        ("unrated", "best", "eval_correct_rate"),
        ("theirs", "best", "this is not a run"),
        ("runs/nothing", "", "no such folder"),
        ("a/b/c", "", "no such folder"),
        ("file", "", "is a file"),
        ("runs", "", "give one of them: runs/one"),
        ("void", "", "neither a run nor an adapter nor a model"),
        ("broken", "", "cannot be read"),
        ("baseless", "", "names no base model"),
    ],
)
def test_what_cannot_be_used_is_said(
    name: str, checkpoint: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("run"), RATES)
    make_run(Path("empty"), {})
    make_run(Path("unrated"), {"final": (3, None)})
    make_run(Path("runs/one"), RATES)
    write_adapter(Path("theirs"))
    write_adapter(Path("baseless"), base_model_name_or_path=None)
    Path("broken").mkdir()
    Path("broken/adapter_config.json").write_text("[]")
    Path("void").mkdir()
    Path("file").write_text("")
    with pytest.raises(ConfigError) as caught:
        find_subject(name, checkpoint)
    assert words in str(caught.value)


class Loads:
    """A backend that can only go on from checkpoints, and refuses one of them."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def load(self, folder: Path) -> None:
        self.loaded.append(folder.name)
        if folder.name == "broken":
            raise BackendError

    def publish(self) -> int:
        return len(self.loaded)


def test_what_an_opened_policy_has_is_not_loaded_again_except_after_a_failure() -> None:
    config: Any = SimpleNamespace(place=lambda key: key, backend=SimpleNamespace(backend="loads"))
    given: Any = {"subject": None, "plugins": None, "context": None, "config": config, "backend": Loads()}
    policy: Any = Opened(**given)
    policy.use(None)  # a backend that was just built has the base, whether or not it can return to it
    for name in ("a", "a", "b", "b", "a"):
        policy.use(Path(name))
    assert policy.backend.loaded == ["a", "b", "a"]
    replace(policy, subject="another").use(Path("b"))  # which shares what is loaded
    policy.use(Path("a"))
    with pytest.raises(BackendError):
        policy.use(Path("broken"))
    policy.use(Path("a"))
    assert policy.backend.loaded[3:] == ["b", "a", "broken", "a"]
    with pytest.raises(BackendError, match="cannot return to the model that training began with"):
        policy.use(None)
