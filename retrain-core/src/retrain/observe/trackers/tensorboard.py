"""Recorder `tensorboard`: the numbers of `metrics.jsonl` as scalars in `<log_dir>/tensorboard/`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrain.kernel.contracts.context import PluginContext
from retrain.observe.trackers.recording import named_metrics, require

NEXT_STEP = "tensorboard_next_step"
FIRST_STEP = -1
# TensorBoard reads this as the first record of every event file.
FILE_VERSION = "brain.Event:2"


def build(context: PluginContext) -> TensorboardRecorder:
    require("tensorboard", where=context.config.place("logging.recorders"))
    return TensorboardRecorder(first_step=FIRST_STEP - context.config.sft.steps)


class TensorboardRecorder:
    """An event file per session, one record per step, on disk when `step` returns.

    The evaluation before training has step -1, a warm-up the steps before. A session that finds files of earlier
    sessions marks the step from which they are outdated. Uses TensorBoard's own record format, without
    TensorFlow or PyTorch.
    """

    def __init__(self, first_step: int = FIRST_STEP) -> None:
        self._writer: Any = None
        self._next_step = first_step

    def restore(self, state: Mapping[str, Any]) -> None:
        self._next_step = int(state[NEXT_STEP])

    def state(self) -> dict[str, int]:
        return {NEXT_STEP: self._next_step}

    def start(self, manifest: Mapping[str, Any], folder: Path) -> None:
        """Open a new event file; TensorBoard reads the files of a folder in order of their names."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory = folder / "tensorboard"
        directory.mkdir(parents=True, exist_ok=True)
        has_earlier = any(directory.iterdir())
        self._writer = RecordWriter((directory / f"events.out.tfevents.{time.time_ns()}.retrain").open("xb"))
        self._write(file_version=FILE_VERSION)
        if has_earlier:
            # TensorBoard drops the points of earlier files from the step of this record on.
            self._write(step=self._next_step, session_log=SessionLog(status=SessionLog.START))

    def step(self, metrics: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in named_metrics(metrics).items()
            if isinstance(value, bool | int | float)
        ]
        self._write(step=metrics["step"], summary=Summary(value=values))
        self._next_step = metrics["step"] + 1

    def finish(self, error: BaseException | None = None) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _write(self, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.write(Event(wall_time=time.time(), **content).SerializeToString())
        # A killed run keeps every line that it has logged.
        self._writer.flush()
