"""How the payloads of a step reach the trainer: as files on a shared disk, here, or over ZeroMQ, next door."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from retrain.api import BackendError, Problem

ROLLOUTS = "rollouts"
SCALAR_FILE = "rollouts.bin"


class Transport(Protocol):
    """Carries steps to the trainer, each once and in order. Payload r is for data rank r; the older wire has one."""

    def send(self, step: int, payloads: Sequence[bytes]) -> None:
        """Hand over a step; BackendError when it could not be, and then no rank has it or all have it."""

    def tend(self) -> None:
        """Do what the trainer asks for meanwhile; called again and again while its weights are waited for."""

    def close(self) -> None:
        """Release sockets; safe to call twice."""


def rank_files(ranks: int) -> tuple[str, ...]:
    """Names of a step's files on the per-token wire."""
    return tuple(f"rank_{rank}.bin" for rank in range(ranks))


class FileTransport:
    """`<output_dir>/rollouts/step_<N>/<name>`: a step appears with all its files at once, by one rename."""

    def __init__(self, output_dir: Path, names: Sequence[str]) -> None:
        self._rollouts = output_dir / ROLLOUTS
        self._names = tuple(names)

    def send(self, step: int, payloads: Sequence[bytes]) -> None:
        """Write and rename; the files are on the disk when it returns."""
        target, draft = self._rollouts / f"step_{step}", self._rollouts / f".step_{step}.tmp"
        try:
            shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed while writing
            draft.mkdir(parents=True)
            for name, payload in zip(self._names, payloads, strict=True):
                _write(draft / name, payload)
            os.rename(draft, target)  # fails when it exists and holds something
        except OSError as error:
            what = f"step {step} could not be handed to the trainer: {error.strerror or error}"
            why = "somebody else sends steps into this folder" if target.exists() else ""
            fix = (
                "give each run an output_dir and a trainer of its own" if why else "mend the disk, then resume the run"
            )
            raise BackendError(Problem(where=str(target), what=what, why=why, fix=fix)) from error

    def tend(self) -> None:
        """Nothing: the files wait for whoever comes late or comes back."""

    def close(self) -> None:
        """Nothing is held."""


def _write(file: Path, payload: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(payload)
        stream.flush()
        os.fsync(stream.fileno())
