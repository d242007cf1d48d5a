"""How the payloads of a step reach the trainer: the interface, and files on a shared disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from retrain.api import BackendError, Problem
from retrain_prime_rl.broadcasts import numbered

ROLLOUTS, BATCHES = "rollouts", "batches"  # the folder of batches up to v0.8, and of newer trainers
SCALAR_FILE = "rollouts.bin"


class Transport:
    """Carries steps to the trainer, each once and in order. Payload r is for data rank r; the older wire has one."""

    def send(self, step: int, payloads: Sequence[bytes]) -> None:
        raise NotImplementedError

    def serve_ranks(self) -> None:
        """Handle requests of the ranks; called repeatedly while waiting for the weights."""

    def forget(self, before: int) -> None:
        """The trainer will not read steps numbered below `before` again: drop what is stored of them."""

    def close(self) -> None:
        """Release sockets; safe to call twice."""


def rank_files(ranks: int) -> tuple[str, ...]:
    """Names of a step's files on the per-token wire."""
    return tuple(f"rank_{rank}.bin" for rank in range(ranks))


class FileTransport(Transport):
    """`<output_dir>/rollouts/step_<N>/<name>`: a step appears with all its files at once, by one rename.

    `batches` links to the same folder.
    """

    def __init__(self, output_dir: Path, names: Sequence[str]) -> None:
        self._rollouts = output_dir / ROLLOUTS
        self._names = tuple(names)

    def send(self, step: int, payloads: Sequence[bytes]) -> None:
        target, draft = self._rollouts / f"step_{step}", self._rollouts / f".step_{step}.tmp"
        try:
            shutil.rmtree(draft, ignore_errors=True)  # left by a process killed while writing
            draft.mkdir(parents=True)
            with suppress(FileExistsError):
                self._rollouts.with_name(BATCHES).symlink_to(ROLLOUTS, target_is_directory=True)
            for name, payload in zip(self._names, payloads, strict=True):
                with (draft / name).open("wb") as stream:
                    stream.write(payload)
                    stream.flush()
                    os.fsync(stream.fileno())
            os.rename(draft, target)  # fails if it exists and is not empty
        except OSError as error:
            what = f"step {step} could not be sent to the trainer: {error.strerror or error}"
            why = "another process sends steps to this folder" if target.exists() else ""
            fix = "give each run an output_dir and a trainer of its own" if why else "fix the disk, then resume the run"
            raise BackendError(Problem(where=str(target), what=what, why=why, fix=fix)) from error

    def forget(self, before: int) -> None:
        """Remove their folders: the trainer removes its own broadcasts, but no batches."""
        for step, folder in numbered(self._rollouts).items():
            if step < before:
                shutil.rmtree(folder, ignore_errors=True)  # tried again after the next step
