"""A run as it stood before one of its steps: policy, optimizer and algorithm, without sampling anything."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.credit.algorithm import build_algorithm
from retrain.inspect.replay.agreement import Agreement, agreement
from retrain.inspect.replay.stored_groups import check_credit, groups_of
from retrain.kernel.contracts.algorithm import Algorithm, Credit
from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import CheckpointError, ConfigError, NonFiniteError, Problem, ResumeError
from retrain.kernel.registry import Plugins
from retrain.kernel.step_fields import train_fields
from retrain.kernel.types import Group, TrainBatch
from retrain.records.checkpoints import Checkpoint, read_checkpoint
from retrain.records.record_names import CONFIG_FILE
from retrain.records.run import Run, StoredStep
from retrain.run.backend import build_backend
from retrain.run.configure import Checked, load_file
from retrain.run.devices import settle_devices
from retrain.run.interrupts import Interrupts
from retrain.run.opened import SILENT
from retrain.run.seed_sources import run_seeds
from retrain.run.steps.controls import controlled_algorithm
from retrain.run.steps.updates import Updates
from retrain.text.terminal_text import printable
from retrain.text.tokenizer.load import load_tokenizer

LOG = logging.getLogger("retrain")


@dataclass(slots=True, kw_only=True, eq=False)
class Position:
    """The run before `step`. `start` is the checkpoint that was loaded, None for what the seed makes of the model.

    `forward` are the steps trained since, and how far each agrees with its record.
    """

    run: Path
    step: int
    checked: Checked
    context: PluginContext
    algorithm: Algorithm
    backend: Backend
    updates: Updates
    start: Checkpoint | None
    manifest: Mapping[str, Any]
    forward: dict[int, Agreement] = field(default_factory=dict)

    def stored(self, step: int) -> tuple[StoredStep, tuple[Group, ...], Credit]:
        """A step's records, its groups, and their credit as it was; ConfigError when that cannot be had."""
        stored = Run(self.run).step(step)
        groups = groups_of(stored, correct_above=self.context.config.scoring.correct_above)
        credit = self.algorithm.assign(step, groups)
        check_credit(stored, credit)
        return stored, groups, credit

    def batch(self, step: int, credit: Credit) -> TrainBatch:
        """What `retrain.kernel.step.Step` trains of this credit."""
        return TrainBatch(
            step=step,
            rows=credit.rows,
            temperature=self.context.config.training.temperature,
            num_masked=credit.num_masked,
            masked_groups=credit.masked_groups,
        )

    def take(self, step: int) -> Agreement:
        """Train a step on its stored tokens and compare with its line; ConfigError when it is another step."""
        stored, groups, credit = self.stored(step)
        report = None
        if credit.rows:
            try:
                report = self.updates.train(self.batch(step, credit))
            except NonFiniteError:  # the run went on without this step, too
                report = None
        self.algorithm.observe(step, groups, credit)
        found = agreement(stored.metrics, train_fields(report))
        if not found.is_close:
            what = f"trained on its stored tokens, step {step} has {found.worst}"
            why = "policy, data or code are not those of the run, so nothing after it can be replayed"
            fix = "replay on the machine and with the versions that ran; `retrain status RUN --resume` names changes"
            raise ConfigError(Problem(where=printable(str(self.run)), what=what, why=why, fix=fix))
        return found


@contextmanager
def before_step(run: Path, step: int, plugins: Plugins) -> Iterator[Position]:
    """Within the block the run stands before `step`; ConfigError naming the steps that can be replayed otherwise."""
    manifest = Run(run).started_manifest()
    known = Run(run).token_steps()
    start = _start(run, manifest, step, known)
    overrides = [f"--set={path}={value}" for path, value in SILENT.items()]
    if start:
        overrides.append("--set=model.adapter=")  # what training began with: the checkpoint has it all
    checked = load_file(run / CONFIG_FILE, overrides, plugins)
    devices = settle_devices(checked.config, plugins, manifest)
    config = devices.config
    _refuse_control(run, config.training.control)
    context = PluginContext(
        config=config,
        seeds=run_seeds(config, int(manifest["seed"])),
        plugins=plugins,
        tokenizer=load_tokenizer(config, plugins),
    )
    algorithm = controlled_algorithm(build_algorithm(checked.flow, context), config)
    if start and (saved := start.state["algorithm"]):
        algorithm.restore(saved)
    backend = build_backend(context)
    try:
        if start:
            backend.load(start.path)
        stops = Interrupts(grace_s=config.training.grace_s)
        position = Position(
            run=run,
            step=step,
            checked=checked,
            context=context,
            algorithm=algorithm,
            backend=backend,
            updates=Updates(config, backend, context.seeds, stops),
            start=start,
            manifest=manifest,
        )
        for number in range(start.first_unwritten_step if start else 0, step):
            if number in known:  # a step that could not be sampled has no records and trained nothing
                LOG.info("Step %d again, on its stored tokens", number)
                position.forward[number] = position.take(number)
        yield position
    finally:
        backend.close()


def checkpoints_by_steps(run: Path, manifest: Mapping[str, Any]) -> dict[int, Checkpoint]:
    """The intact checkpoints of a run by the number of steps in them."""
    found: dict[int, Checkpoint] = {}
    for folder in Run(run).checkpoints():
        try:
            checkpoint = read_checkpoint(folder)
        except CheckpointError as error:
            LOG.warning("Damaged checkpoint passed over: %s", error)
            continue
        if checkpoint.state.get("run_started") == manifest.get("started"):
            found.setdefault(checkpoint.first_unwritten_step, checkpoint)
    return found


def _start(run: Path, manifest: Mapping[str, Any], step: int, known: list[int]) -> Checkpoint | None:
    """The newest checkpoint before the step, None for the beginning of the run; ConfigError when there is neither."""
    found = checkpoints_by_steps(run, manifest)
    first = 0 if not _has_warm_up(manifest) else min((steps for steps in found if steps >= 0), default=None)
    replayable = [] if first is None else [each for each in known if each >= first]
    if step not in replayable:
        there = _spans(replayable) or "none"
        what = f"step {step} cannot be replayed; those that can: {there}"
        why = "" if step not in known else "supervised steps come before its first checkpoint, and keep no records"
        fix = f"give one of them: --step {replayable[-1]}" if replayable else "replay a run that has trained a step"
        raise ConfigError(Problem(where=printable(str(run)), what=what, why=why, fix=fix))
    return found.get(max((steps for steps in found if 0 <= steps <= step), default=-1))


def _has_warm_up(manifest: Mapping[str, Any]) -> bool:
    return bool(manifest.get("config", {}).get("sft", {}).get("steps", 0))


def _spans(steps: list[int]) -> str:
    """`0 to 5, 9`."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and spans[-1][1] == step - 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in spans)


def _refuse_control(run: Path, control: str) -> None:
    if control == "no_update":
        what = "is a control with no_update: none of its steps was trained"
        raise ResumeError(Problem(where=printable(str(run)), what=what, fix="replay the run that it is a control of"))
