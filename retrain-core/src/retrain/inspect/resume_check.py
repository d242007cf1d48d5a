"""Reports the parts of a run that a resume would restore, and the others; reads files only and loads no model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from retrain.kernel.errors import ResumeError
from retrain.kernel.plugins.resolve import declared_capabilities
from retrain.kernel.registry import Plugins
from retrain.kernel.types import CheckpointMode, Kind
from retrain.records.checkpoints import Checkpoint, without_checksum
from retrain.records.files import owner_of
from retrain.records.identity.collect import Identity
from retrain.records.run import accepted_changes
from retrain.run.check import identity_of, wanted_names
from retrain.run.configure import load_checked
from retrain.run.restore import restore_obstacles
from retrain.run.resume_plan import ResumePlan, plan_resume
from retrain.run.tables import registered_tables
from retrain.text.amounts import first_few

MOST_NAMES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A part of the run's state: its content, or why it is not restored."""

    part: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeCheck:
    """Result of `retrain status RUN --resume`; `obstacles` are the reasons why this resume is impossible.

    `accepted` are the changes that earlier resumes accepted with `--resume-anyway`.
    """

    run: str
    checkpoint: str = ""
    next_step: int = 0
    is_complete: bool = False
    restored: tuple[Item, ...] = ()
    not_restored: tuple[Item, ...] = ()
    obstacles: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()

    @property
    def can_resume(self) -> bool:
        return not self.obstacles

    def as_data(self) -> dict[str, Any]:
        return {"can_resume": self.can_resume, **asdict(self)}


def check_resume(run: Path, config_file: Path | None, plugins: Plugins) -> ResumeCheck:
    """Check a run folder against the configuration that would continue it, by default the run's.

    ConfigError if that configuration is invalid.
    """
    named = [str(config_file)] if config_file else []
    checked = load_checked([*named, "--resume", str(run)], plugins)
    config = checked.config
    obstacles = [f"the run is still active (process {pid})"] if (pid := owner_of(run)) else []
    try:
        identity = identity_of(config, plugins, checked.tables)
        plan = plan_resume(run, config, checked.keys, identity, plugins)
    except ResumeError as error:
        return ResumeCheck(run=str(run), obstacles=(*obstacles, *map(str, error.problems)))
    capabilities = declared_capabilities(config, plugins)
    mode = capabilities.checkpoint_resume_mode if capabilities else CheckpointMode.EXACT
    obstacles += [f"{change}; undo the change or add --resume-anyway" for change in plan.accepted]
    obstacles += map(str, restore_obstacles(plan.checkpoint, checked, plugins))
    lost = [Item(part="checkpoint", detail=str(problem)) for problem in plan.damaged]
    lost += [Item(part=str(change.kind), detail=str(change)) for change in plan.refused]
    lost += [Item(part="changed", detail=notice) for notice in plan.input_notices]
    if mode is CheckpointMode.ADAPTER_ONLY:
        detail = f"backend {config.backend.backend!r} keeps no optimizer state: its moments restart at zero"
        lost.append(Item(part="optimizer", detail=detail))
    lost += [Item(part="records", detail=notice) for notice in plan.records.notices]
    if plan.checkpoint:
        if names := without_checksum(plan.checkpoint.path):
            detail = f"{len(names)} without a checksum, not part of the checkpoint: {first_few(names, MOST_NAMES)}"
            lost.append(Item(part="files", detail=detail))
        wanted = wanted_names(config, registered_tables(plugins)).values()
        recorders = {name for kind, name in wanted if kind is Kind.RECORDER}
        unclaimed = sorted(plan.checkpoint.state["plugins"].get("recorders", {}).keys() - recorders)
        lost += [Item(part="recorder", detail=f"{name} is not in this configuration") for name in unclaimed]
    else:
        lost.append(Item(part="steps", detail="there is no valid checkpoint: the run starts again with its own seed"))
    return ResumeCheck(
        run=str(run),
        checkpoint=str(plan.checkpoint.path) if plan.checkpoint else "",
        next_step=plan.next_step,
        is_complete=plan.is_complete(config.training.max_steps),
        restored=tuple(_restored(plan, plan.checkpoint, mode, identity)) if plan.checkpoint else (),
        not_restored=tuple(lost),
        accepted=tuple(accepted_changes(plan.manifest)),
        obstacles=tuple(obstacles),
    )


def _restored(plan: ResumePlan, checkpoint: Checkpoint, mode: CheckpointMode, identity: Identity) -> Iterator[Item]:
    state = checkpoint.state
    unknown = {checkpoint.path / name for name in without_checksum(checkpoint.path)}
    files = [file for file in checkpoint.path.rglob("*") if file.is_file() and file not in unknown]
    size_kib = sum(file.stat().st_size for file in files) // 1024
    what = "policy" if mode is CheckpointMode.ADAPTER_ONLY else "policy and optimizer"
    yield Item(part=what, detail=f"{len(files)} files, {size_kib} KiB, all checksums match")
    yield Item(part="seed", detail=str(plan.seed))
    if not plan.changes:
        counts = ", ".join(f"{len(getattr(identity, kind))} of {kind}" for kind in ("code", "data", "model"))
        same = f"the files are those that the run recorded: {counts}, {len(identity.plugins)} plugin distributions"
        yield Item(part="inputs", detail=f"{same}; examples are compared once they are loaded")
    counters = state["progress"]
    right, seen = counters["total_correct"], counters["total_completions"]
    detail = f"{plan.next_step} steps, {counters['example_idx']} prompts sampled, {right} of {seen} right"
    yield Item(part="counters", detail=detail)
    if counters["unfinished"] is not None:
        yield Item(part="unfinished step", detail="its optimizer step is done, its evaluation is pending")
    for part, values in state["algorithm"].items():
        shown = ", ".join(f"{name} = {value}" for name, value in values.items()) if isinstance(values, dict) else values
        yield Item(part=part, detail=str(shown))
    plugins = state["plugins"]
    for part, names in (("plugin", plugins.keys() - {"recorders"}), ("recorder", plugins.get("recorders", {}))):
        for name in sorted(names):
            yield Item(part=part, detail=name)
    for name, size in state["record_sizes"].items():
        present = (plan.run / name).stat().st_size
        cut = f"cut from {present} to {size} bytes" if present > size else f"{size} bytes, none to cut"
        yield Item(part="records", detail=f"{name}: {cut}")


def check_lines(check: ResumeCheck) -> list[str]:
    if check.obstacles:
        head = f"{check.run} cannot be resumed:"
    elif check.is_complete:
        head = f"{check.run} is complete: {check.next_step} steps are done; a larger --max-steps continues it"
    else:
        head = f"{check.run} can be resumed at step {check.next_step}, from {check.checkpoint or 'the beginning'}"
    obstacles = [f"  {line}" for obstacle in check.obstacles for line in obstacle.split("\n")]
    accepted = [Item(part=f"{number}.", detail=line) for number, line in enumerate(check.accepted, start=1)]
    sections = {"restored": check.restored, "not restored": check.not_restored, "accepted by --resume-anyway": accepted}
    return [head, *obstacles, *(line for title, items in sections.items() for line in _section(title, items))]


def _section(title: str, items: Sequence[Item]) -> list[str]:
    if not items:
        return []
    width = max(len(item.part) for item in items)
    next_line = "\n" + " " * (4 + width)
    text = "\n".join(f"  {item.part:<{width}}  " + item.detail.replace("\n", next_line) for item in items)
    return [f"{title}:", *text.split("\n")]
