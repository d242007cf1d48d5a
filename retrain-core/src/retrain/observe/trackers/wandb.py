"""Recorder `wandb`: metrics, configuration and, if requested, adapters of a run in Weights & Biases."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrain.kernel.contracts.context import PluginContext
from retrain.observe.trackers.contract import TrackerKeys
from retrain.observe.trackers.recording import PROVENANCE, KeepsId, named_config, named_metrics, require, run_name
from retrain.run.wandb_runs import open_run, wandb_key

LOG = logging.getLogger("retrain")
STEP = "train/step"
# The evaluation before training in `metrics.jsonl`; wandb itself has no negative steps.
BEFORE = -1


def build(context: PluginContext) -> WandbRecorder:
    """The recorder; ConfigError when wandb is not installed, a warning without a key. wandb is imported at `start`."""
    config = context.config
    selected_by = "logging.wandb_project" if config.table("logging", TrackerKeys).wandb_project else "logging.recorders"
    require("wandb", where=config.place(selected_by))
    is_found, detail = wandb_key()
    if not is_found:
        fix = "run `wandb login` or set WANDB_API_KEY to send it, WANDB_MODE=offline if that is what you want"
        LOG.warning("wandb: %s, so the run will be kept offline; %s", detail, fix)
    return WandbRecorder(artifacts=config.table("logging", TrackerKeys).checkpoint_artifacts)


class WandbRecorder(KeepsId):
    """One wandb run. Everything it sends comes from `run.json` and `metrics.jsonl`, where secrets are hidden.

    wandb's own step is the batch index. It has no step -1: the evaluation before training shares the row of step 0,
    where an evaluation after step 0 overwrites it, and always stays in the summary as `eval_before/...`. In a run with
    a warm-up wandb's step counts from the first supervised step on. `train/step` is the batch index in every run,
    negative before the first step, and the horizontal axis of a run with a warm-up. After a resume, wandb skips the
    steps that it already has.
    """

    id_key = "wandb_run_id"

    def __init__(self, *, artifacts: bool) -> None:
        self._artifacts = artifacts
        self._run: Any = None
        super().__init__()
        self._first_step = 0

    def start(self, manifest: Mapping[str, Any], folder: Path) -> None:
        logging_table = manifest["config"]["logging"]
        tags = [tag.strip() for tag in logging_table["wandb_tags"].split(",")]
        arguments = {
            "project": logging_table["wandb_project"] or None,
            "entity": logging_table["wandb_entity"] or None,
            "group": logging_table["wandb_group"] or None,
            "name": run_name(manifest),
            "tags": [tag for tag in tags if tag] or None,
            "dir": os.environ.get("WANDB_DIR") or str(folder),
            "config": {**named_config(manifest), "retrain": {part: manifest.get(part) for part in PROVENANCE}},
        }
        if self._run_id:
            arguments |= {"id": self._run_id, "resume": "allow", "allow_val_change": True}
        self._run = open_run(arguments)
        self._run_id = self._run.id
        if warm_up := manifest["config"].get("sft", {}).get("steps", 0):
            self._first_step = -(warm_up + 1)
            self._run.define_metric(STEP)
            self._run.define_metric("*", step_metric=STEP)

    def step(self, metrics: Mapping[str, Any]) -> None:
        values, step = named_metrics(metrics), metrics["step"]
        if step == BEFORE:
            self._run.summary.update({name.replace("eval/", "eval_before/"): value for name, value in values.items()})
        at = step - self._first_step
        self._run.log({**values, STEP: step}, step=max(at, 0), commit=at >= 0)

    def checkpoint(self, folder: Path, name: str) -> None:
        """The PEFT files as the next version of artifact `adapter-RUN_ID`, if `checkpoint_artifacts` is true."""
        if not self._artifacts:
            return
        import wandb

        artifact = wandb.Artifact(f"adapter-{self._run_id}", type="model", metadata={"checkpoint": name})
        # The optimizer's state is left out: it is twice as large.
        for file in sorted(folder.glob("adapter_*")):
            artifact.add_file(str(file))
        self._run.log_artifact(artifact, aliases=["latest", name])

    def finish(self, error: BaseException | None = None) -> None:
        """Send the rest, within five minutes (`WANDB_FINISH_TIMEOUT`); a run with an error is marked as failed."""
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=0 if error is None else 1)
