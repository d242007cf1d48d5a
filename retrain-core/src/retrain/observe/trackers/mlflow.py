"""Recorder `mlflow`: metrics and configuration of a run in MLflow, by default in a database in the run's folder."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from threading import Condition, Thread
from typing import Any

from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import StopRequested
from retrain.observe.trackers.recording import PROVENANCE, KeepsId, named_config, named_metrics, require, run_name

LOG = logging.getLogger("retrain")
URI = "MLFLOW_TRACKING_URI"
DATABASE = "mlflow.db"
STEP = "train/step"
# A finished run waits at most a minute for a server that is down; attempts are half a minute apart.
FINISH_TIMEOUT_S, PAUSE_S = 60.0, 30.0
# A server that stays away must not fill the memory, so then the oldest lines are dropped.
MOST_WAITING = 10_000
# Older MLflow servers refuse longer values.
TAG_CHARS, PARAM_CHARS = 5_000, 500
# MLflow refuses a whole batch for one character that its names may not have.
FOREIGN = re.compile(r"[^\w\-. :/]", re.ASCII)
# MLflow's own defaults retry for minutes; the user's own values stay.
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


def build(context: PluginContext) -> MlflowRecorder:
    """The recorder; ConfigError when MLflow, or a package its database needs, is not installed; imported at `start`."""
    needs = () if os.environ.get(URI) else ("sqlalchemy", "alembic")
    require("mlflow", where=context.config.place("logging.recorders"), needs=needs)
    return MlflowRecorder()


class MlflowRecorder(KeepsId):
    """One run of an MLflow experiment, at the steps of `metrics.jsonl`; the evaluation before training has step -1.

    A thread sends the lines, so that neither a slow database nor a server that is down holds up a step. After a resume
    it skips the steps that MLflow already has.
    """

    id_key = "mlflow_run_id"

    def __init__(self) -> None:
        super().__init__()
        self._sender: _Sender | None = None
        self._last_step: float | None = None

    def start(self, manifest: Mapping[str, Any], folder: Path) -> None:
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        # Without this, several lines about a new database would appear among the run's.
        for library in ("mlflow", "alembic"):
            logging.getLogger(library).setLevel(logging.WARNING)
        uri = os.environ.get(URI) or f"sqlite:///{(folder / DATABASE).resolve()}"
        client = MlflowClient(tracking_uri=uri)
        if self._run_id:
            self._last_step = client.get_run(self._run_id).data.metrics.get(STEP)
            client.update_run(self._run_id, status="RUNNING")
        else:
            from mlflow.entities import Param, RunTag

            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or manifest["config"]["logging"]["project"]
            experiment = client.get_experiment_by_name(name)
            place = experiment.experiment_id if experiment else client.create_experiment(name)
            self._run_id = client.create_run(place, run_name=run_name(manifest)).info.run_id
            params = [Param(key, str(value)[:PARAM_CHARS]) for key, value in named_config(manifest).items()]
            provenance = {part: json.dumps(manifest.get(part))[:TAG_CHARS] for part in PROVENANCE if part != "config"}
            tags = [RunTag(f"retrain.{part}", text) for part, text in provenance.items()]
            client.log_batch(self._run_id, params=params, tags=tags)
        self._sender = _Sender(client, self._run_id)
        place = uri if uri.startswith("sqlite:") else "the server of MLFLOW_TRACKING_URI"
        LOG.info("mlflow run %s is kept in %s", self._run_id, place)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Queue a line; raises, once, the error of sending an earlier one."""
        assert self._sender is not None
        if self._last_step is None or metrics["step"] > self._last_step:
            self._sender.add(metrics)
        self._sender.raise_failure()

    def finish(self, error: BaseException | None = None) -> None:
        """Send the rest, within a minute, and mark the run: finished, killed by a signal, or failed."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.finish("FINISHED" if error is None else "KILLED" if isinstance(error, StopRequested) else "FAILED")


class _Sender:
    """Sends lines in order from a separate thread; a failed one is retried after a pause."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id
        self._waiting: deque[tuple[Mapping[str, Any], int]] = deque(maxlen=MOST_WAITING)
        self._changed = Condition()
        self._status = ""
        self._failure: Exception | None = None
        self._thread = Thread(target=self._send_all, name="retrain-mlflow", daemon=True)
        self._thread.start()

    def add(self, metrics: Mapping[str, Any]) -> None:
        with self._changed:
            self._waiting.append((metrics, int(1000 * time.time())))
            self._changed.notify()

    def raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def finish(self, status: str) -> None:
        with self._changed:
            self._status = status
            self._changed.notify()
        self._thread.join(FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError(f"{len(self._waiting)} lines were not sent within {FINISH_TIMEOUT_S:.0f} s")
        self.raise_failure()

    def _send_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._status)
                lines = list(self._waiting)
            try:
                for line in lines:
                    self._send(*line)
                    with self._changed:
                        # A full queue may have dropped this line while it was sent.
                        if self._waiting and self._waiting[0] is line:
                            self._waiting.popleft()
                # The retry has sent everything: nothing was lost, so the error need not be raised.
                self._failure = None
                if self._status and not self._waiting:
                    self._client.set_terminated(self._run_id, self._status)
                    return
            # A server that is down, or a full disk: the next step reports it, from the run's own thread.
            except Exception as error:
                self._failure = error
                if self._status:
                    return
                with self._changed:
                    self._changed.wait_for(lambda: self._status, PAUSE_S)

    def _send(self, metrics: Mapping[str, Any], time_ms: int) -> None:
        from mlflow.entities import Metric

        step = metrics["step"]
        values = {FOREIGN.sub("_", name): value for name, value in named_metrics(metrics).items()} | {STEP: step}
        sent = [
            Metric(name, float(value), time_ms, step)
            for name, value in values.items()
            if isinstance(value, bool | int | float)
        ]
        self._client.log_batch(self._run_id, metrics=sent)
