"""Opens the folder of a run for reading: identity, configuration, steps, evaluations, completions, tokens, checkpoints.

Everything but `run.json` is read again each time, so a `Run` shows the current state of one that is still going on, and
a damaged file fails only the caller that needs it. The writer is `folder.py`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.kernel.errors import ConfigError, Problem, ResumeError
from retrain.records.checkpoints import checkpoint_folders
from retrain.records.identity.copies import stored_identity
from retrain.records.places import adapters_of
from retrain.records.reading import (
    Record,
    last_record,
    number,
    parse_record,
    parsed_lines,
    read_object,
    read_records,
    read_steps,
    read_toml,
)
from retrain.records.record_names import (
    CONFIG_FILE,
    EVALUATION,
    GENERATIONS,
    METRICS,
    RUN_FILE,
    TOKENS,
    token_file,
)

if TYPE_CHECKING:
    import numpy as np

    from retrain.records.runs.curves import Curves
    from retrain.records.tokens import TokenRecord

RATE = "eval_correct_rate"


def is_run(folder: Path) -> bool:
    """True if the folder is that of a run that has started."""
    return os.path.isfile(folder / RUN_FILE)  # Path.is_file raises for a name that is too long


@dataclass(frozen=True)
class Run:
    """The run in `folder`. ConfigError names the file, and the line, of a damaged record.

    A file that does not exist yet has no lines, and an incomplete last line counts as absent. The methods that import
    what they call need numpy, which `retrain status` starts without.
    """

    folder: Path

    @cached_property
    def manifest(self) -> Record:
        """`run.json`: what ran, with which configuration and versions, and how it ended."""
        return read_object(self.folder / RUN_FILE)

    @property
    def record(self) -> Record:
        """`manifest`, or an empty record where that cannot be read."""
        try:
            return self.manifest
        except ConfigError:
            return {}

    def started_manifest(self) -> Record:
        """`manifest` if it has what a resume needs, a seed and a start; ResumeError otherwise."""
        try:
            int(self.manifest["seed"]), str(self.manifest["started"])
        except (ConfigError, ValueError, KeyError, TypeError) as error:
            reason = error.problems[0].what if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            what = f"cannot be read: {reason.removeprefix('cannot be read: ')}"
            fix = "give the log_dir of a run that had started"
            raise ResumeError(Problem(where=str(self.folder / RUN_FILE), what=what, fix=fix)) from error
        return self.manifest

    def table(self, name: str) -> Mapping[str, Any]:
        """A table of the configuration as it was resolved, defaults included; empty where it is not recorded."""
        config = self.record.get("config")
        found = config.get(name) if isinstance(config, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    @property
    def settings(self) -> Record:
        """The tables of `config.toml`, which reproduces the run."""
        return read_toml(self.folder / CONFIG_FILE)

    @property
    def identity(self) -> dict[str, Any]:
        """Hashes of code, data, model and plugins, with their files where they are listed; {} where not recorded."""
        return stored_identity(self.folder, self.record)

    def steps(self) -> Iterator[tuple[int, Record]]:
        """Step and line of `metrics.jsonl`, streamed; the evaluation before training is step -1."""
        return read_steps(self.folder / METRICS) if self.has(METRICS) else iter(())

    def last_step(self, *, field: str = "", skip_damaged: bool = False) -> Record:
        """The last line of `metrics.jsonl`, or the last with `field`, read from the end; empty without one."""
        return last_record(self.folder / METRICS, field=field, skip_damaged=skip_damaged) or {}

    @property
    def num_steps(self) -> int:
        """Finished steps, by the last line."""
        step = number(self.last_step(skip_damaged=True).get("step"))
        return 0 if step is None else max(0, int(step) + 1)

    def curves(self, fields: Collection[str]) -> Curves:
        """The numbers of these fields and of every evaluation, as arrays over the steps."""
        from retrain.records.runs.curves import read_curves

        return read_curves(self.folder / METRICS, fields)

    def held_out(self) -> dict[int, float]:
        """The rate of correct held-out answers, by the step after which it was measured."""
        return {step: rate for step, line in self.steps() if (rate := number(line.get(RATE))) is not None}

    def evaluations(self) -> Iterator[Record]:
        """The lines of `eval.jsonl`: one per held-out example and evaluation."""
        return self._lines(EVALUATION)

    def completions(self) -> Iterator[tuple[int, Record]]:
        """Step and line of every completion, in the order of steps."""
        return read_steps(self.folder / GENERATIONS) if self.has(GENERATIONS) else iter(())

    def completions_of(self, step: int) -> list[Record]:
        """The completions of a step; lines of other steps are not parsed."""
        mark = f'{{"step": {step},'.encode()  # the first field of each line
        file = self.folder / GENERATIONS
        lines = parsed_lines(file, lambda line: parse_record(line) if line.startswith(mark) else None)
        return [record for _, record in lines if record is not None]

    def tokens(self, step: int) -> list[TokenRecord]:
        """The tokens of a step with their credit, in the order of `completions_of`."""
        from retrain.records.tokens import read_tokens

        return read_tokens(self.folder, step)

    def token_arrays(self, step: int, names: Collection[str]) -> dict[str, np.ndarray] | None:
        """Arrays over all tokens of a step, by name; None if the step has no file."""
        from retrain.records.tokens import read_arrays

        return read_arrays(self.folder, step, names) if token_file(self.folder, step).is_file() else None

    def token_steps(self) -> list[int]:
        """The steps whose tokens are stored."""
        names = (file.stem.rpartition("_")[2] for file in (self.folder / TOKENS).glob("step_*.safetensors"))
        return sorted(int(name) for name in names if name.isdecimal())

    @property
    def adapters(self) -> Path:
        """The folder of its checkpoints."""
        return adapters_of(self.folder, self.record)

    def checkpoints(self) -> list[Path]:
        """The folders of its checkpoints, newest first, damaged ones included."""
        return checkpoint_folders(self.adapters)

    def has(self, name: str) -> bool:
        """True if it has this file."""
        return (self.folder / name).exists()

    def _lines(self, name: str) -> Iterator[Record]:
        return (line for _, line in read_records(self.folder / name)) if self.has(name) else iter(())
