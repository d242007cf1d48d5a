"""Opens the folder of a run for reading: identity, configuration, steps, evaluations, completions, tokens, checkpoints.

Everything but `run.json` is read again each time, so a `Run` follows a run in progress, and a damaged file fails only
the caller that needs it. The writer is `folder.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.kernel.errors import ConfigError, Problem, ResumeError
from retrain.records import reading, record_names
from retrain.records.checkpoints import checkpoint_folders
from retrain.records.identity.copies import stored_identity
from retrain.records.reading import Record, number, read_if_any, read_steps, table_of, tables_in
from retrain.records.record_names import EVALUATION, GENERATIONS, METRICS, RUN_FILE, token_file

if TYPE_CHECKING:
    import numpy as np

    from retrain.records.completions import TokenRecord
    from retrain.records.runs.curves import Curves


RATE = "eval_correct_rate"
SET_RATE = re.compile(r"eval_(\w+)_correct_rate")


def eval_sets(fields: Iterable[str]) -> dict[str, str]:
    """Return the correct rates of further evaluation sets among `fields`, by set: `eval_NAME_correct_rate`."""
    return {found[1]: field for field in fields if (found := SET_RATE.fullmatch(field))}


def task_names(record: Record) -> tuple[str, ...]:
    """Return the names of the `[[data.tasks]]` of a `run.json`."""
    return tuple(str(task.get("name")) for task in tables_in(table_of(record, "config", "data").get("tasks")))


# A sampler's and a shadow's rates are of a task too, and not its own.
TASK_RATE = re.compile(r"task_(\w+)(?<!_sampler_uniform)(?<!_shadow)_correct_rate")


def task_rates(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the correct rate of each task of `[[data.tasks]]` in a step's line."""
    found = ((TASK_RATE.fullmatch(field), number(value)) for field, value in line.items())
    return {field[1]: rate for field, rate in found if field and rate is not None}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredCompletion:
    """A completion: its line of `generations.jsonl` and its tokens."""

    record: Record
    tokens: TokenRecord

    @property
    def reward(self) -> float | None:
        """The reward behind the credit; None without a verdict, or when that was dropped."""
        reward: float | None = self.record.get("shaped_reward", self.record["reward"])
        return reward


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredStep:
    step: int
    metrics: Record
    groups: tuple[tuple[StoredCompletion, ...], ...]


def is_run(folder: Path) -> bool:
    return os.path.isfile(folder / RUN_FILE)  # Path.is_file raises for a name that is too long


@dataclass(frozen=True)
class Run:
    """The run in `folder`. ConfigError names the file, and the line, of a damaged record.

    A missing file has no lines; with `required` it is an error. An incomplete last line counts as absent.
    """

    folder: Path

    @cached_property
    def manifest(self) -> Record:
        """The content of `run.json`."""
        return reading.read_object(self.folder / RUN_FILE)

    @property
    def record(self) -> Record:
        """The content of `run.json`; empty if it cannot be read."""
        try:
            return self.manifest
        except ConfigError:
            return {}

    def started_manifest(self) -> Record:
        """Return `manifest` if it has the seed and start that a resume needs; ResumeError otherwise."""
        try:
            int(self.manifest["seed"]), str(self.manifest["started"])
        except (ConfigError, ValueError, KeyError, TypeError) as error:
            reason = error.problems[0].what if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            what, fix = f"is not the record of a run: {reason}", "give the log_dir of a run that had started"
            where = str(self.folder / RUN_FILE)
            raise ResumeError(Problem(code="resume.no-run", where=where, what=what, fix=fix)) from error
        return self.manifest

    def table(self, name: str) -> Mapping[str, Any]:
        """Return a table of the resolved configuration, defaults included; empty if it is not recorded."""
        return table_of(self.record, "config", name)

    @property
    def settings(self) -> Record:
        """The tables of `config.toml`."""
        return reading.read_toml(self.folder / record_names.CONFIG_FILE)

    @property
    def identity(self) -> dict[str, Any]:
        """Hashes of code, data, model and plugins, with their files where these are listed; {} if not recorded."""
        return stored_identity(self.folder, self.record)

    def steps(self, *, required: bool = False) -> Iterator[tuple[int, Record]]:
        """Yield step and line of `metrics.jsonl`; the evaluation before training is step -1."""
        return read_steps(self.folder / METRICS) if required or self.has(METRICS) else iter(())

    def last_step(self, *, field: str = "", skip_damaged: bool = False) -> Record:
        """Return the last line of `metrics.jsonl`, or the last with `field`; empty without one."""
        return reading.last_record(self.folder / METRICS, field=field, skip_damaged=skip_damaged) or {}

    @property
    def num_steps(self) -> int:
        """Finished steps, by the last line; 0 if the file cannot be read."""
        try:
            step = number(self.last_step(skip_damaged=True).get("step"))
        except ConfigError:
            return 0
        return 0 if step is None else max(0, int(step) + 1)

    def curves(self, fields: Collection[str]) -> Curves:
        """Return the numbers of these fields and of every evaluation, as arrays over the steps."""
        from retrain.records.runs.curves import read_curves

        return read_curves(self.folder / METRICS, fields)

    def held_out(self) -> dict[int, float]:
        return {step: rate for step, line in self.steps() if (rate := number(line.get(RATE))) is not None}

    def evaluations(self, *, required: bool = False) -> Iterator[Record]:
        """Yield the lines of `eval.jsonl`, one per held-out example and evaluation."""
        is_read = required or self.has(EVALUATION)
        return (line for _, line in reading.read_records(self.folder / EVALUATION)) if is_read else iter(())

    def completions(self, *, required: bool = False) -> Iterator[tuple[int, Record]]:
        return read_steps(self.folder / GENERATIONS) if required or self.has(GENERATIONS) else iter(())

    def completions_of(self, *steps: int) -> list[Record]:
        """Return the completions of these steps; lines of other steps are not parsed."""
        # Filter by the first field before parsing: parsing all lines takes most of the time.
        marks = tuple(f'{{"step": {step},'.encode() for step in steps)
        file = self.folder / GENERATIONS
        lines = reading.parsed_lines(file, lambda line: reading.parse_record(line) if line.startswith(marks) else None)
        return [record for _, record in lines if record is not None]

    def tokens(self, step: int) -> list[TokenRecord]:
        """Return the tokens of a step with their credit, in the order of `completions_of`."""
        from retrain.records.stored_tokens import read_tokens

        return read_tokens(self.folder, step)

    def step(self, number: int | None) -> StoredStep:
        """Return a step, the last one by default: its line, and its completions with their tokens, group by group."""
        metrics: Record = {}
        for step, line in self.steps(required=True):
            if step >= 0 and (number is None or step == number):
                metrics = line
        if not metrics:
            what, fix = f"holds no step{'' if number is None else f' {number}'}", "choose another --step"
            raise ConfigError(Problem(code="run.no-such-step", where=str(self.folder / METRICS), what=what, fix=fix))
        chosen = int(metrics["step"])
        tokens, records = self.tokens(chosen), self.completions_of(chosen)
        if len(records) != len(tokens):
            what = f"step {chosen} has {len(records)} completions but {len(tokens)} token records"
            fix = "choose another --step, or restore its files"
            raise ConfigError(Problem(code="record.step-damaged", where=str(self.folder), what=what, fix=fix))
        by_group: dict[int, list[StoredCompletion]] = {}
        for record, record_tokens in zip(records, tokens, strict=True):
            by_group.setdefault(record["group"], []).append(StoredCompletion(record=record, tokens=record_tokens))
        return StoredStep(step=chosen, metrics=metrics, groups=tuple(tuple(group) for group in by_group.values()))

    def token_arrays(self, step: int, names: Collection[str]) -> dict[str, np.ndarray] | None:
        """Return arrays over all tokens of a step, by name; None if the step has no file."""
        from retrain.records.stored_tokens import read_arrays

        return read_arrays(self.folder, step, names) if token_file(self.folder, step).is_file() else None

    def token_steps(self) -> list[int]:
        files = (self.folder / record_names.TOKENS).glob("step_*.safetensors")
        names = (file.stem.rpartition("_")[2] for file in files)
        return sorted(int(name) for name in names if name.isdecimal())

    @property
    def adapters(self) -> Path:
        given = self.table("backend").get("adapter_path", "")
        if not given:
            return self.folder / record_names.ADAPTERS
        from retrain.records.places import recorded_places  # few runs name a folder

        places = recorded_places(self.record, self.folder)
        known = (place.of_output for place in places if place.keys == ("backend", "adapter_path"))
        return Path(next(known, given)).expanduser()

    def checkpoints(self) -> list[Path]:
        """Return the folders of its checkpoints, newest first, damaged ones included."""
        return checkpoint_folders(self.adapters)

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()


@dataclass(frozen=True, slots=True)
class StartedFrom:
    """The folder and manifest of a run or campaign that recorded the paths of its configuration."""

    folder: Path
    manifest: Mapping[str, Any]


def records_of(file: Path | None, resumed: str) -> list[StartedFrom]:
    """Return the run that is resumed, or that has `file`, then its campaign; empty unless paths are recorded."""
    own = Path(resumed).expanduser() if resumed else file.parent if file else None
    found = []
    for folder in filter(None, [own, *(path.absolute().parent.parent for path in (own, file) if path)]):
        manifests = (read_if_any(folder / name) for name in (RUN_FILE, record_names.CAMPAIGN_FILE))
        found += [StartedFrom(folder, manifest) for manifest in manifests if manifest][:1]
    return found if any(record.manifest.get(record_names.PATHS) for record in found) else []


RESUMES, VARIABLE = "resumes", "environment variable"


def resumes(manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(tables_in(manifest.get(RESUMES)))


def accepted_changes(manifest: Mapping[str, Any]) -> list[str]:
    """Return a line per accepted change or changed variable: `resumed at step 12 although reward.py:3 changed ...`."""
    told = []
    for entry in resumes(manifest):
        accepted, noticed = (each if isinstance(each, list) else [] for each in map(entry.get, ("accepted", "noticed")))
        accepted = [*accepted, *(each for each in noticed if str(each).startswith(VARIABLE))]
        told += [f"resumed at step {entry.get('step')} although {change}" for change in accepted]
    return told


# Keys in which runs of one condition may differ: none of them affects the learning.
FREE_TABLES = frozenset({"logging", "resume", "deadlines", "health", "campaign", "squeeze", "plugins"})
FREE_KEYS = frozenset(
    {
        *("training.seed", "training.max_steps", "training.save_every", "training.keep_last", "training.keep_best"),
        *("training.keep_best_metric", "training.grace_s", "backend.adapter_path", "backend.devices"),
        *("backend.throttle_dir", "backend.max_concurrent", "scoring.workers", "scoring.memory_gb", "scoring.cache"),
    }
)
SEED_KEYS = frozenset({"training.seed", "training.seeds", "eval.seed"})

SettingsKey = tuple[tuple[str, str], ...]


def settings_key(record: Mapping[str, Any]) -> SettingsKey:
    """Return the settings of a `run.json` that decide its learning, as sorted pairs of key and value."""
    return tuple(sorted((path, str(value)) for path, value in compared_settings(record) if path not in SEED_KEYS))


def compared_settings(record: Record) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a `run.json` in which runs of one condition may not differ: key and value."""
    for table, keys in table_of(record, "config").items():
        if table in FREE_TABLES or not isinstance(keys, dict):
            continue
        for key, value in keys.items():
            if (path := f"{table}.{key}") not in FREE_KEYS:
                yield path, value


class Control(StrEnum):
    """A change to a copy of a run against which its gain is measured; evaluation keeps the true verifier."""

    RANDOM_REWARD = "random_reward"  # training is rewarded by the toss of a seeded coin
    FORMAT_ONLY = "format_only"  # training is rewarded for an answer that the verifier can read, right or wrong
    NO_UPDATE = "no_update"  # everything but the optimizer step


def control_label(label: str, control: Control) -> str:
    return f"{label}+{control}"


def control_of_record(record: Mapping[str, Any]) -> Control | None:
    name = table_of(record, "config", "training").get("control")
    return next((each for each in Control if each == name), None)
