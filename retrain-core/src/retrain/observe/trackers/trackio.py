"""Recorder `trackio`: metrics and configuration of a run in Trackio, on this machine or where its variables point."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from retrain.kernel.contracts.context import PluginContext
from retrain.observe.trackers.recording import PROVENANCE, KeepsId, named_config, named_metrics, require, run_name

LOG = logging.getLogger("retrain")


def build(context: PluginContext) -> TrackioRecorder:
    require("trackio", where=context.config.place("logging.recorders"))
    return TrackioRecorder()


class TrackioRecorder(KeepsId):
    """One run of a Trackio project, at the steps of `metrics.jsonl`; the evaluation before training has step -1.

    Its name ends with the time of its start, since trackio finds a run by its name. After a resume it skips the steps
    that trackio already has. trackio sends lines from its own thread and buffers them while the server is away.
    """

    id_key = "trackio_run_name"

    def __init__(self) -> None:
        self._run: Any = None
        super().__init__()
        self._next_step: int | None = None

    def start(self, manifest: Mapping[str, Any], folder: Path) -> None:
        import trackio

        table, is_new = manifest["config"]["logging"], not self._run_id
        name = self._run_id or f"{run_name(manifest)}_s{manifest['seed']} {manifest['started'][:19]}"
        # trackio prints several coloured lines about viewing the run.
        with redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                table["project"],
                name=name,
                group=table["wandb_group"] or None,
                config={**named_config(manifest), "retrain": {part: manifest.get(part) for part in PROVENANCE}},
                resume="never" if is_new else "allow",
                # Only the content of `run.json` and `metrics.jsonl` is sent, whatever trackio could measure itself.
                auto_log_cpu=False,
                auto_log_gpu=False,
                embed=False,
            )
        self._run_id = name
        self._next_step = None if is_new else getattr(self._run, "_next_step", None)
        LOG.info("trackio run %s: trackio show --project %s", name, table["project"])

    def step(self, metrics: Mapping[str, Any]) -> None:
        if self._next_step is None or metrics["step"] >= self._next_step:
            self._run.log(named_metrics(metrics), step=metrics["step"])

    def finish(self, error: BaseException | None = None) -> None:
        run, self._run = self._run, None
        if run is not None:
            import trackio

            with redirect_stdout(io.StringIO()):
                trackio.finish()
