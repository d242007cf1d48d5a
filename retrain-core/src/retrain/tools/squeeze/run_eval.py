"""Evaluates any checkpoint of a run as the run evaluates its policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from retrain.kernel.errors import ConfigError, PluginError, Problem
from retrain.kernel.registry import Plugins
from retrain.records.run import is_run
from retrain.run.opened import Opened, opened
from retrain.run.subject import BASE, find_subject
from retrain.tasks.tasks import closed_on_error, load_tasks
from retrain.tools.squeeze.evaluate import Evaluate


def run_of(adapter: Path) -> Path:
    """The run that saved an adapter: the nearest parent folder with a `run.json`; ConfigError if there is none."""
    for folder in adapter.resolve().parents:
        if is_run(folder):
            return folder
    what = "no parent folder is a run, so it is unknown what to evaluate the adapter on"
    raise ConfigError(Problem(where=str(adapter), what=what, fix="give the run: --run DIR"))


@contextmanager
def evaluator(run: Path, plugins: Plugins, overrides: Sequence[str] = ()) -> Iterator[Evaluate]:
    """Within the block, a function that evaluates a checkpoint folder as the run `run` evaluated its policy.

    The model is loaded once. ConfigError when the run has no held-out examples.
    """
    with opened(find_subject(run, BASE), plugins, overrides) as policy:
        if not policy.config.eval.examples:
            why = "every example may have been trained on, and a rate on those is meaningless"
            fix = "train with [eval] examples, for instance --eval-examples 64"
            raise ConfigError(Problem(where=str(run), what="this run held out no examples", why=why, fix=fix))
        tasks = load_tasks(policy.context)
        with closed_on_error(tasks.verifier):
            evaluation = plugins.notify("retrain_evaluation", context=policy.context, tasks=tasks)
            if evaluation is None:
                what, fix = "the part of retrain-core that evaluates is missing", "reinstall retrain-core"
                raise PluginError(Problem(where="--eval", what=what, fix=fix))
        try:
            yield lambda folder: _evaluate(policy, evaluation, folder)
        finally:
            evaluation.close()
            tasks.verifier.close()


def _evaluate(policy: Opened, evaluation: Any, checkpoint: Path) -> Mapping[str, float]:
    policy.use(checkpoint)
    found: Mapping[str, float] = evaluation.measure(0, policy.backend, None)
    return {name: value for name, value in found.items() if not name.endswith("time_s")}
