"""A name becomes the weights that it means, or an error that says what there is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retrain.kernel.errors import ConfigError
from retrain.records.checkpoints import save_checkpoint
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


def test_the_base_of_a_run_has_no_folder(tmp_path: Path) -> None:
    subject = find_subject(make_run(tmp_path / "run", {}), "base")
    assert (subject.folder, subject.model, subject.checkpoint, subject.steps) == (None, "builtin:tiny", "base", 0)


def test_a_run_is_found_by_its_adapter_folder_and_by_a_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", RATES)
    assert find_subject(run / "adapter").checkpoint == "final"
    assert find_subject(run / "adapter" / "checkpoint_step_5").steps == 5
    assert find_subject(run / "adapter" / "checkpoint_step_5").run == run


def test_checkpoints_at_another_place_are_found(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", RATES, adapter_path=str(tmp_path / "elsewhere"))
    assert find_subject(run).folder == tmp_path / "elsewhere" / "final"


def test_all_checkpoints_of_a_run_oldest_first(tmp_path: Path) -> None:
    assert [each.steps for each in checkpoints_of(make_run(tmp_path / "run", RATES))] == [5, 10, 12]


def test_an_adapter_names_its_base_and_shape(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "theirs", use_rslora=True)
    subject = find_subject(folder)
    assert (subject.kind, subject.model, subject.folder, subject.run) == ("adapter", "builtin:tiny", folder, None)
    assert adapter_shape(folder) == {
        "model.lora_rank": 8,
        "lora.alpha": 16,
        "lora.rslora": True,
        "lora.dora": False,
    }


@pytest.mark.parametrize("name", ["builtin:tiny", "gpt2", "Qwen/Qwen3-0.6B"])
def test_what_is_no_folder_here_is_a_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    subject = find_subject(name)
    assert (subject.kind, subject.model, subject.folder) == (SubjectKind.MODEL, name, None)


def test_a_folder_with_a_model(tmp_path: Path) -> None:
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
