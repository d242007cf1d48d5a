"""Decides how an interrupted run continues: from which checkpoint, and whether it is still the same run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.kernel.config.keys import Key
from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import Problem, ResumeError
from retrain.rooms.session.records.checkpoints import FINAL, Checkpoint, newest_valid
from retrain.rooms.session.records.manifest import public_values
from retrain.rooms.session.records.rewind import check_sizes, read_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A key whose value differs from the one the run was started with."""

    path: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.path} was {self.before!r} and is now {self.now!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePlan:
    """What a resume would do. Without a valid checkpoint the run restarts from the beginning, with its own seed."""

    run: Path
    adapters: Path
    manifest: Mapping[str, Any]
    checkpoint: Checkpoint | None
    damaged: tuple[Problem, ...]
    differences: tuple[Difference, ...]

    @property
    def next_step(self) -> int:
        """The step to continue with."""
        return self.checkpoint.next_step if self.checkpoint else 0

    def is_complete(self, max_steps: int) -> bool:
        """Whether the run ended normally and its last checkpoint contains at least `max_steps` steps."""
        last = self.checkpoint
        is_whole = last is not None and last.path.name == FINAL and self.manifest.get("status") == "done"
        return is_whole and self.next_step >= max_steps

    @property
    def seed(self) -> int:
        """Root seed of the run, regardless of the configuration."""
        return int(self.manifest["seed"])


def plan_resume(run: Path, config: Config, keys: list[Key]) -> ResumePlan:
    """Inspect a run folder without changing it; ResumeError when it is not a run, or its records are truncated."""
    manifest = read_manifest(run)
    adapters = adapters_of(run, manifest)
    checkpoint, damaged = newest_valid(adapters)
    if checkpoint is not None:
        _refuse_stranger(checkpoint, manifest)
        check_sizes(run, checkpoint.state["record_sizes"])
    return ResumePlan(
        run=run,
        adapters=adapters,
        manifest=manifest,
        checkpoint=checkpoint,
        damaged=tuple(damaged),
        differences=tuple(_differences(manifest, config, keys)),
    )


def adapters_of(run: Path, manifest: Mapping[str, Any]) -> Path:
    """The folder of a run's checkpoints."""
    given = manifest.get("config", {}).get("backend", {}).get("adapter_path", "")
    return Path(given).expanduser() if given else run / "adapter"


def _refuse_stranger(checkpoint: Checkpoint, manifest: Mapping[str, Any]) -> None:
    theirs, ours = checkpoint.state.get("run_started"), manifest.get("started")
    if theirs != ours:
        what = f"is a checkpoint of the run that started at {theirs}, not of this one ({ours})"
        fix = "its own checkpoints were moved aside when that run began: move them back to [backend] adapter_path"
        raise ResumeError(Problem(where=str(checkpoint.path), what=what, fix=fix))


def refuse_changes(plan: ResumePlan, *, anyway: bool) -> None:
    """ResumeError naming every key whose change would make it a different run, unless the user insists."""
    if plan.differences and not anyway:
        raise ResumeError(
            *(
                Problem(
                    where=f"[resume] {plan.run}",
                    what=str(difference),
                    why="the run would not be the one that was stopped",
                    fix="take it back, or insist with --resume-anyway",
                )
                for difference in plan.differences
            )
        )


def _differences(manifest: Mapping[str, Any], config: Config, keys: list[Key]) -> list[Difference]:
    before, now = manifest.get("config", {}), public_values(config)
    found = []
    for key in keys:
        if key.free_on_resume or key.table not in now:
            continue
        old = before.get(key.table, {}).get(key.name, key.default)
        new = manifest["seed"] if _keeps_seed(key, config) else now[key.table].get(key.name, key.default)
        old = manifest["seed"] if key.path == "training.seed" else old
        if old != new:
            found.append(Difference(path=key.path, before=old, now=new))
    return found


def _keeps_seed(key: Key, config: Config) -> bool:
    return key.path == "training.seed" and config.training.seed < 0
