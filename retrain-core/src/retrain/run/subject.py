"""Resolves the name of something to use: a run, one of its checkpoints, an adapter, or a model."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from retrain.kernel.errors import ConfigError, Problem
from retrain.records.checkpoints import (
    ADAPTER_CONFIG,
    FINAL,
    MODEL_FILE,
    STATE,
    Checkpoint,
    best_of,
    checkpoint_folders,
    read_checkpoint,
    steps_of,
)
from retrain.records.reading import table_of
from retrain.records.record_names import RUN_FILE
from retrain.records.run import Run, is_run
from retrain.text.terminal_text import printable

BASE, BEST = "base", "best"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class SubjectKind(StrEnum):
    RUN = "run"
    ADAPTER = "adapter"
    MODEL = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Weights by the name that a user gave.

    `model` is the base: a folder, a hub id or `builtin:NAME`. `folder` holds the weights trained on it, a checkpoint or
    a PEFT adapter; None is the base itself. `run` is the run that trained it, None if unknown. `checkpoint` names it
    within the run (`final`, `checkpoint_step_20`, `base`), and `steps` counts its optimizer steps.
    """

    named: str
    kind: SubjectKind
    model: str
    folder: Path | None = None
    run: Path | None = None
    checkpoint: str = ""
    steps: int | None = None

    @property
    def label(self) -> str:
        return printable(f"{self.run} ({self.checkpoint})" if self.run else self.named)


def find_subject(named: str | Path, checkpoint: str = "") -> Subject:
    """Find the weights of this name; ConfigError if they do not exist.

    `named` is a run folder, a checkpoint of a run, a folder with a PEFT adapter, a folder with a model, a hub id or
    `builtin:NAME`. Of a run, `checkpoint` chooses: `final`, `best` (the highest `[training] keep_best_metric`), a
    number of steps, the name of a checkpoint folder, or `base`, the model that training began with; by default it is
    the newest.
    """
    name = str(named)
    folder = Path(name).expanduser()
    if folder.is_dir() and (run := _run_of(folder)):
        return _of_run(name, run, folder, checkpoint)
    if checkpoint:
        what = f"--checkpoint {checkpoint} chooses among the checkpoints of a run, and this is not a run"
        where, fix = printable(name), "give the folder of a run"
        raise ConfigError(Problem(code="checkpoint.not-a-run", where=where, what=what, fix=fix))
    if not folder.is_dir():
        # Names that look like a hub id, or are of a built-in model, may be models that are not on this disk.
        is_in_a_folder = "/" in name and Path(name).parent.is_dir()
        is_model = name.startswith("builtin:") or (HUB_ID.fullmatch(name) and not is_in_a_folder)
        if folder.exists() or not is_model:
            what = "is a file" if folder.exists() else "there is no such folder"
            fix = "give the folder of a run, an adapter or a model, or the id of a model"
            raise ConfigError(Problem(code="model.not-found", where=printable(name), what=what, fix=fix))
        return Subject(named=name, kind=SubjectKind.MODEL, model=name)
    if (folder / ADAPTER_CONFIG).is_file():
        base = str(_adapter_document(folder).get("base_model_name_or_path") or "")
        if not base:
            what, fix = "adapter_config.json names no base model", "add base_model_name_or_path to it"
            raise ConfigError(Problem(code="model.no-base-model", where=printable(name), what=what, fix=fix))
        return Subject(named=name, kind=SubjectKind.ADAPTER, model=base, folder=folder)
    if (folder / "config.json").is_file():
        return Subject(named=name, kind=SubjectKind.MODEL, model=str(folder))
    raise _unusable(name, folder)


def checkpoints_of(run: Path) -> list[Subject]:
    """Every intact checkpoint of a run, oldest first; CheckpointError names one that is damaged."""
    manifest = Run(run).started_manifest()
    found = map(read_checkpoint, reversed(Run(run).checkpoints()))
    return [_of_checkpoint(str(run), run, checkpoint, _model_of(manifest)) for checkpoint in found]


def adapter_shape(folder: Path) -> dict[str, Any]:
    """`rank`, `alpha`, `rslora` and `dora` of a PEFT adapter, as `[model]` and `[lora]` name them."""
    document = _adapter_document(folder)
    return {
        "model.lora_rank": int(document.get("r", 1)),
        "lora.alpha": int(document.get("lora_alpha", 0)),
        "lora.rslora": bool(document.get("use_rslora", False)),
        "lora.dora": bool(document.get("use_dora", False)),
    }


def _of_run(name: str, run: Path, folder: Path, checkpoint: str) -> Subject:
    """A checkpoint of a run, chosen by `checkpoint` or because `folder` is one."""
    manifest = Run(run).started_manifest()
    if checkpoint == BASE:
        return Subject(named=name, kind=SubjectKind.RUN, model=_model_of(manifest), run=run, checkpoint=BASE, steps=0)
    adapters = Run(run).adapters
    if (folder / STATE).is_file() and not checkpoint:
        chosen: Path | None = folder
    else:
        chosen = _chosen(adapters, checkpoint, manifest)
    where = printable(name)
    if chosen is None and not checkpoint:
        what, fix = "this run has no checkpoint yet", f"give `--checkpoint {BASE}`, or train on"
        raise ConfigError(Problem(code="checkpoint.none-yet", where=where, what=what, fix=fix))
    if chosen is None:
        known = ", ".join(path.name for path in reversed(checkpoint_folders(adapters))) or "none"
        what, why = f"there is no checkpoint {checkpoint!r}", f"there are: {known}"
        fix = f"give one of these, {BEST} or {BASE}"
        raise ConfigError(Problem(code="checkpoint.unknown", where=where, what=what, why=why, fix=fix))
    return _of_checkpoint(name, run, read_checkpoint(chosen), _model_of(manifest))


def _chosen(adapters: Path, checkpoint: str, manifest: Any) -> Path | None:
    found = checkpoint_folders(adapters)
    if checkpoint == BEST:
        metric = table_of(manifest, "config", "training").get("keep_best_metric", "eval_correct_rate")
        if (best := best_of(found, metric)) is None and found:
            what = f"no checkpoint was saved with {metric}, so none is the best"
            fix = "give a number of steps, or train with [eval] every equal to [training] save_every"
            raise ConfigError(Problem(code="checkpoint.no-best", where=printable(str(adapters)), what=what, fix=fix))
        return best
    if checkpoint.isdecimal():
        named = [path for path in found if path.name == f"checkpoint_step_{int(checkpoint)}"]
        # The last checkpoint is called `final`, whatever its step.
        final = [path for path in found if path.name == FINAL and steps_of(path) == int(checkpoint)]
        return next(iter(named + final), None)
    return next((path for path in found if not checkpoint or path.name == checkpoint), None)


def _of_checkpoint(name: str, run: Path, checkpoint: Checkpoint, model: str) -> Subject:
    return Subject(
        named=name,
        kind=SubjectKind.RUN,
        model=model,
        folder=checkpoint.path,
        run=run,
        checkpoint=checkpoint.path.name,
        steps=checkpoint.first_unwritten_step,
    )


def _run_of(folder: Path) -> Path | None:
    """The run whose folder, `adapter` folder or checkpoint this is."""
    if is_run(folder):
        return folder
    is_checkpoint = (folder / STATE).is_file()
    parents = folder.resolve().parents
    # A checkpoint lies two folders below its run: RUN/adapter/CHECKPOINT.
    near = parents[1:2] if is_checkpoint else parents[:1]
    if is_checkpoint or folder.name == "adapter":
        return next((parent for parent in near if is_run(parent)), None)
    return None


def _model_of(manifest: Any) -> str:
    return str(table_of(manifest, "config", "model").get("model", ""))


def _adapter_document(folder: Path) -> dict[str, Any]:
    file = folder / ADAPTER_CONFIG
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise ValueError("not an object")
    except (OSError, ValueError, RecursionError) as error:
        # Deeply nested JSON ends in a RecursionError, not a ValueError.
        what, fix = f"cannot be read: {type(error).__name__}: {error}", "give a complete adapter"
        where = printable(str(file))
        raise ConfigError(Problem(code="model.unreadable", where=where, what=what, fix=fix)) from error
    return document


def _unusable(name: str, folder: Path) -> ConfigError:
    where = printable(name)
    if (folder / MODEL_FILE).is_file():
        what, fix = "has weights and no config.json", "give a complete model folder"
        return ConfigError(Problem(code="model.no-config", where=where, what=what, fix=fix))
    if runs := sorted(str(file.parent.relative_to(folder)) for file in folder.glob(f"*/{RUN_FILE}"))[:5]:
        what, fix = f"holds runs but is not a run: {', '.join(runs)}", f"give one of them: {Path(name) / runs[0]}"
        return ConfigError(Problem(code="run.folder-of-runs", where=where, what=what, fix=fix))
    what, fix = "is neither a run nor an adapter nor a model", "give a folder with run.json, or a model's"
    return ConfigError(Problem(code="model.unknown-folder", where=where, what=what, fix=fix))
