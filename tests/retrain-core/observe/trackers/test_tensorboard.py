"""Event files read back with TensorBoard's own reader."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.kernel.errors import ConfigError
from retrain.kernel.plugins.missing import install_line
from retrain.observe.trackers.recording import named_metrics, require
from retrain.observe.trackers.tensorboard import TensorboardRecorder

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_every_number_of_every_line_is_a_scalar(
    recorded_run: Path, read_tensorboard: Callable[..., Any], metrics_lines: Callable[..., Any]
) -> None:
    curves = read_tensorboard(recorded_run)
    wanted: dict[str, dict[int, float]] = {}
    for line in metrics_lines(recorded_run):
        for name, value in named_metrics(line).items():
            if not isinstance(value, str):
                wanted.setdefault(name, {})[line["step"]] = float(np.float32(value))
    assert curves == wanted
    assert set(curves["eval/correct_rate"]) == {-1, 1}
    assert set(curves["train/loss"]) == {0, 1}


def test_a_line_is_on_disk_before_the_run_ends(tmp_path: Path, read_tensorboard: Callable[..., Any]) -> None:
    recorder = TensorboardRecorder()
    recorder.start({}, tmp_path)
    recorder.step({"step": 0, "loss": 0.5})
    assert read_tensorboard(tmp_path) == {"train/loss": {0: 0.5}}
    recorder.finish()
    recorder.finish()


def test_a_resumed_session_replaces_the_steps_after_its_checkpoint(
    tmp_path: Path, read_tensorboard: Callable[..., Any]
) -> None:
    first = TensorboardRecorder()
    first.start({}, tmp_path)
    first.step({"step": -1, "eval_correct_rate": 1.0})
    states = []
    for step in range(5):
        first.step({"step": step, "loss": float(step)})
        states.append(first.state())
    first.finish(KeyboardInterrupt())
    second = TensorboardRecorder()
    second.restore(states[1])
    second.start({}, tmp_path)
    second.step({"step": 2, "loss": 20.0})
    second.finish()
    assert read_tensorboard(tmp_path) == {"eval/correct_rate": {-1: 1.0}, "train/loss": {0: 0.0, 1: 1.0, 2: 20.0}}
    again = TensorboardRecorder()  # begun again in its folder: it replaces everything
    again.start({}, tmp_path)
    again.step({"step": -1, "eval_correct_rate": 2.0})
    again.finish()
    assert read_tensorboard(tmp_path) == {"eval/correct_rate": {-1: 2.0}}


def test_neither_torch_nor_tensorflow_is_imported(tmp_path: Path, python: Callable[..., str]) -> None:
    source = """
import sys
from pathlib import Path
from retrain.observe.trackers.tensorboard import TensorboardRecorder
recorder = TensorboardRecorder()
recorder.start({}, Path(sys.argv[1]))
recorder.step({"step": 0, "loss": 0.5})
print([name for name in ("torch", "tensorflow") if name in sys.modules])
"""
    assert python(source, str(tmp_path)).strip() == "[]"


def test_a_missing_package_is_reported_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=re.escape(install_line("retrain-core", "tensorboard"))):
        require("tensorboard", where="[logging] recorders")


def test_a_mere_folder_of_that_name_is_not_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leftover").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="not installed"):
        require("leftover", where="here")
