"""Finds, before data and model load, why a checkpoint cannot be restored even with `--resume-anyway`."""

from __future__ import annotations

from dataclasses import replace

from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import Problem, ResumeError
from retrain.kernel.plugins.build import build_part
from retrain.kernel.plugins.capabilities import declared_capabilities
from retrain.kernel.registry import Plugins
from retrain.kernel.types import CheckpointMode, Kind
from retrain.records.checkpoints import Checkpoint
from retrain.run.configure import Checked
from retrain.run.savepoint import CONTROLLER, algorithm_state
from retrain.run.seed_sources import run_seeds

NOT_EVEN = "--resume-anyway cannot change that"


def restore_obstacles(checkpoint: Checkpoint | None, checked: Checked, plugins: Plugins) -> list[Problem]:
    """Every reason why backend and controller could not continue from the checkpoint."""
    if checkpoint is None:
        return []
    config, problems = checked.config, []
    capabilities = declared_capabilities(config, plugins)
    if capabilities is not None and capabilities.checkpoint_resume_mode is CheckpointMode.UNSUPPORTED:
        what, fix = f"backend {config.backend.backend!r} cannot load a checkpoint", "start a new run"
        problems.append(Problem(where=config.place("backend.backend"), what=what, why=NOT_EVEN, fix=fix))
    saved = algorithm_state(checkpoint.state).get(CONTROLLER)
    if saved and checked.flow.controller:
        seeds = run_seeds(config, int(checkpoint.state["seed"]))
        context = PluginContext(config=config, seeds=seeds, plugins=plugins)
        try:
            controller = build_part(Kind.CONTROLLER, checked.flow.controller, "algorithm.transform_mode", context)
            controller.restore(saved)
        except ResumeError as error:
            whys = [f"{problem.why}; {NOT_EVEN}" if problem.why else NOT_EVEN for problem in error.problems]
            problems += [replace(problem, why=why) for problem, why in zip(error.problems, whys, strict=True)]
        except Exception:  # one that needs the tokenizer is restored before the model loads, and says it there
            return problems
    return problems
