"""Continues a killed run: reopens its folder, checks the plan of its resume, restores its state and its records."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.views import RunView
from retrain.kernel.errors import Problem, ResumeError
from retrain.kernel.parts import Parts
from retrain.kernel.plugins.resolve import build_part, declared_capabilities
from retrain.kernel.registry import Plugins
from retrain.kernel.types import CheckpointMode, Kind
from retrain.records.checkpoints import Checkpoint, clear_unfinished, set_newer_aside
from retrain.records.folder import RunFolder, refuse_unwritable
from retrain.records.identity.collect import Identity
from retrain.records.run import Run
from retrain.run.configure import Checked
from retrain.run.interrupts import Interrupts
from retrain.run.resume_plan import ResumePlan, plan_resume, refuse_changes
from retrain.run.run_records import CONTROLLER
from retrain.run.seed_sources import run_seeds
from retrain.text.terminal_text import printable

LOG = logging.getLogger("retrain")
NOT_EVEN = "--resume-anyway cannot change that"


def reopened(run: Path) -> RunFolder:
    """The folder of an interrupted run, locked from now on, so that no other process continues it too."""
    opened = Run(run)
    # Refuses a folder that is not a run before anything is written to it.
    opened.started_manifest()
    adapters = opened.adapters
    refuse_unwritable(run, adapters, place="[resume] from")
    folder = RunFolder(run, adapters)
    clear_unfinished(adapters)
    return folder


def checked_plan(folder: RunFolder, checked: Checked, plugins: Plugins, identity: Identity) -> ResumePlan:
    """Decide and log how to continue; ResumeError when it would not be the same run."""
    plan = plan_resume(folder.path, checked.config, checked.keys, identity, plugins)
    refuse_changes(plan, anyway=checked.config.resume.anyway)
    if obstacles := restore_obstacles(plan.checkpoint, checked, plugins):
        raise ResumeError(*obstacles)
    for change in plan.accepted:
        LOG.warning("Resuming although %s", printable(change))
    for notice in plan.notices:
        LOG.warning("%s", printable(notice))
    for problem in plan.damaged:
        LOG.warning("Damaged checkpoint passed over: %s", problem)
    source = plan.checkpoint.path if plan.checkpoint else "the beginning: there is no valid checkpoint"
    LOG.info("Resuming %s at step %d from %s", plan.run, plan.next_step, source)
    return plan


def restore_obstacles(checkpoint: Checkpoint | None, checked: Checked, plugins: Plugins) -> list[Problem]:
    """Every reason why backend and controller could not continue from the checkpoint."""
    if checkpoint is None:
        return []
    config, problems = checked.config, []
    capabilities = declared_capabilities(config, plugins)
    if capabilities is not None and capabilities.checkpoint_resume_mode is CheckpointMode.UNSUPPORTED:
        what, fix = f"backend {config.backend.backend!r} cannot load a checkpoint", "start a new run"
        where = config.place("backend.backend")
        problems.append(Problem(code="backend.no-resume", where=where, what=what, why=NOT_EVEN, fix=fix))
    saved = checkpoint.state["algorithm"].get(CONTROLLER)
    if saved and checked.flow.controller:
        seeds = run_seeds(config, int(checkpoint.state["seed"]))
        context = PluginContext(config=config, seeds=seeds, plugins=plugins)
        try:
            controller = build_part(Kind.CONTROLLER, checked.flow.controller, "algorithm.transform_mode", context)
            controller.restore(saved)
        except ResumeError as error:
            whys = [f"{problem.why}; {NOT_EVEN}" if problem.why else NOT_EVEN for problem in error.problems]
            problems += [replace(problem, why=why) for problem, why in zip(error.problems, whys, strict=True)]
        except Exception:
            # A controller that needs the tokenizer is restored, and may refuse, later: before the model loads.
            return problems
    return problems


def restore(parts: Parts, plan: ResumePlan, view: RunView, interrupts: Interrupts, folder: RunFolder) -> None:
    """Restore policy, optimizer and plugins to the checkpoint; if they fit, rewind the records too.

    Algorithm and pacer are restored already. The run publishes the policy later, once it has resampled what had been
    sampled before an update.
    """
    checkpoint = plan.checkpoint
    if checkpoint:
        parts.backend.load(checkpoint.path)
        parts.plugins.notify("retrain_load_state", run=view, state=checkpoint.state["plugins"])
        interrupts.may_resume()
    # Newer checkpoints belong to steps that will be repeated.
    set_newer_aside(plan.adapters, checkpoint)
    sizes = checkpoint.state["record_sizes"] if checkpoint else {}
    folder.rewind(sizes, checkpoint.first_unwritten_step if checkpoint else 0, plan.records.digests)
