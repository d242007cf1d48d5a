"""Evaluates any checkpoint of a run with the run's model, held-out examples and verifier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from retrain.kernel.config.load import all_keys
from retrain.kernel.contracts.tasks import Streams
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.parts import Parts
from retrain.kernel.plugins.manager import Plugins
from retrain.kernel.seeding import Seeds
from retrain.rooms.session.assemble import assemble
from retrain.rooms.session.check import registered_tables
from retrain.rooms.session.configure import load_checked
from retrain.rooms.session.devices import settle_devices
from retrain.rooms.session.records.rewind import read_manifest
from retrain.rooms.squeeze.evaluate import Evaluate

CONFIG_FILE, MANIFEST_FILE = "config.toml", "run.json"
SILENT = {"logging.wandb_project": "", "logging.recorders": "[]"}  # the evaluation is not part of the run


def run_of(adapter: Path) -> Path:
    """The run that saved an adapter: the nearest parent folder with a `run.json`; ConfigError if there is none."""
    for folder in adapter.resolve().parents:
        if (folder / MANIFEST_FILE).is_file():
            return folder
    what = "no parent folder is a run, so it is unknown what to evaluate the adapter on"
    raise ConfigError(Problem(where=str(adapter), what=what, fix="give the run: --run DIR"))


@contextmanager
def evaluator(run: Path, plugins: Plugins, overrides: Sequence[str] = ()) -> Iterator[Evaluate]:
    """Within the block, a function that evaluates a checkpoint folder as the run `run` evaluated its policy.

    The model is loaded once. ConfigError when the run has no held-out examples.
    """
    manifest = read_manifest(run)
    checked = load_checked([str(run / CONFIG_FILE), *overrides, *_silent(plugins)], plugins)
    if not checked.config.eval.examples:
        why = "every example may have been trained on, and a rate on those is meaningless"
        fix = "train with [eval] examples, for instance --eval-examples 64"
        raise ConfigError(Problem(where=str(run), what="this run held out no examples", why=why, fix=fix))
    devices = settle_devices(checked.config, plugins, {})  # an evaluation is not the run: what is there will do
    devices.log()
    parts = assemble(devices.config, plugins, checked.flow, Seeds(int(manifest["seed"]))).parts
    try:
        yield lambda folder: _evaluate(parts, folder)
    finally:
        parts.close()


def _silent(plugins: Plugins) -> list[str]:
    """The overrides that turn every recorder off; a key that no installed recorder reads is left out."""
    known = {key.path for key in all_keys(registered_tables(plugins))}
    return [f"--set={path}={value}" for path, value in SILENT.items() if path in known]


def _evaluate(parts: Parts, checkpoint: Path) -> Mapping[str, float]:
    parts.backend.load(checkpoint)
    parts.backend.publish()
    table = parts.config.eval
    with parts.rollouts.batch("squeeze-eval") as batch:
        batch.sample(parts.prompts.held_out, table.samples, Streams(seeds=Seeds(table.seed), purpose="eval"))
        above = parts.config.scoring.correct_above
        added = parts.plugins.notify("retrain_eval_metrics", scores_EG=batch.scores(), correct_above=above)
    return {name: value for fields in added for name, value in (fields or {}).items()}
