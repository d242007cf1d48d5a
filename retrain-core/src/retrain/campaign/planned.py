"""The runs of a campaign: name, folder, configuration and environment of each, and its state on disk."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import tomli_w

from retrain.campaign.load import Campaign, CheckedCondition, devices_of_a_run
from retrain.kernel.config.keys import Key
from retrain.kernel.config.load import ENV_PREFIX
from retrain.kernel.config.resolved import DEFAULT_ORIGIN, Config
from retrain.kernel.config.toml_file import open_regular
from retrain.kernel.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, ConfigError, ResumeError
from retrain.records.checkpoints import FINAL, newest_valid
from retrain.records.files import owner_of
from retrain.records.manifest import recorded_values
from retrain.records.reading import table_of
from retrain.records.run import Run
from retrain.run.backend import KEY, RunDevices
from retrain.text.secrets import hide, hide_text
from retrain.text.terminal_text import printable

# File systems allow 255 bytes; logs and folders that are moved aside append to the name.
LONGEST_NAME = 120
# wandb refuses longer tags.
TAG_CHARS = 64
_UNSAFE = re.compile(r"[^A-Za-z0-9+~=,._-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run. `name` is `{condition}_s{seed}` in characters that every file system accepts.

    `devices` is the key of its configuration file; None leaves the key out, and the run takes the available ones.
    `values` are those of tuned keys, by path.
    """

    number: int  # from 1, in starting order
    name: str
    condition: CheckedCondition
    seed: int
    folder: Path
    config_file: Path
    max_steps: int
    devices: str | None
    values: Mapping[str, Any] = field(default_factory=dict)


def plan_runs(
    campaign: Campaign,
    folder: Path,
    before: Mapping[str, Any] | None = None,
    devices: Mapping[str, RunDevices] | None = None,
) -> list[PlannedRun]:
    """Every run of the campaign in `folder`: condition by condition, seed by seed; with planned looks, look by look.

    A run of an earlier session keeps its name in the manifest, `before`, whichever conditions were added since.
    `devices` are those that the runs of each condition use, if they are known here.
    """
    seeds, plan = campaign.table.seeds, campaign.table.plan
    ends = [0, *(plan.looks if plan else ()), len(seeds)]
    blocks = [seeds[start:end] for start, end in pairwise(ends)]
    pairs = [(condition, seed) for block in blocks for condition in campaign.conditions for seed in block]
    known = {
        (entry.get("condition"), entry.get("seed")): entry["run_name"] for entry in (before or {"runs": ()})["runs"]
    }
    titles = run_names([f"{condition.label}_s{seed}" for condition, seed in pairs])
    names = [known.get((condition.label, seed), name) for (condition, seed), name in zip(pairs, titles, strict=True)]
    return [
        PlannedRun(
            number=number,
            name=name,
            condition=condition,
            seed=seed,
            folder=folder / "runs" / name,
            config_file=folder / "configs" / f"{name}.toml",
            max_steps=campaign.steps_of(condition),
            devices=devices_of(condition, campaign, (devices or {}).get(condition.label)),
        )
        for number, (name, (condition, seed)) in enumerate(zip(names, pairs, strict=True), start=1)
    ]


def devices_of(condition: CheckedCondition, campaign: Campaign, chosen: RunDevices | None) -> str | None:
    if chosen is None and condition.config.origin(KEY) == DEFAULT_ORIGIN:
        return None
    return devices_of_a_run((chosen.config if chosen else condition.config).backend.devices, campaign.table)


def run_names(titles: list[str]) -> list[str]:
    """A folder name for each title: safe, unique even if case is ignored, and stable for the same titles."""
    plain = [_UNSAFE.sub("-", title) for title in titles]
    counts = Counter(name.casefold() for name in plain)
    names = []
    for title, name in zip(titles, plain, strict=True):
        if name != title or len(name) > LONGEST_NAME or counts[name.casefold()] > 1 or name[0] == ".":
            short = name.rpartition("_s")[0][: LONGEST_NAME - 40].lstrip(".") or "run"
            name = f"{short}-{hashlib.sha256(title.encode()).hexdigest()[:8]}_s{title.rpartition('_s')[2]}"
        names.append(name)
    return names


def run_config(run: PlannedRun, campaign: Campaign, throttle_dir: Path | None) -> dict[str, dict[str, Any]]:
    """The tables of the run's configuration with its secrets, for `config_text` and `run_environ`."""
    config = run.condition.config
    tables = recorded_values(config)
    for path, value in run.values.items():
        *parents, name = path.split(".", 2)
        reduce(lambda inner, each: inner.setdefault(each, {}), parents, tables)[name] = value
    tables["training"] |= {"seed": run.seed, "max_steps": run.max_steps}
    tables["logging"] |= {"log_dir": str(run.folder)} | _wandb(run, config)
    tables["backend"].pop("devices", None)
    if run.devices is not None:
        tables["backend"]["devices"] = run.devices
    if config.backend.adapter_path:
        tables["backend"]["adapter_path"] = str(Path(config.backend.adapter_path) / run.name)
    if throttle_dir is not None and not config.backend.throttle_dir:
        tables["backend"]["throttle_dir"] = str(throttle_dir)
    return {name: table for name, table in tables.items() if table}


def config_text(tables: Mapping[str, Mapping[str, Any]]) -> str:
    return tomli_w.dumps(hide(tables))


def _wandb(run: PlannedRun, config: Config) -> dict[str, str]:
    if "wandb_tags" not in type(config.logging).model_fields:  # without the trackers
        return {}
    from retrain.observe.trackers.contract import TrackerKeys

    # A comma would end the tag.
    label = run.condition.label.replace(",", ";")[:TAG_CHARS]
    logging = config.table("logging", TrackerKeys)
    tags = [tag.strip() for tag in logging.wandb_tags.split(",") if tag.strip()]
    return {
        "wandb_run_name": logging.wandb_run_name or f"{run.condition.label}_s{run.seed}",
        "wandb_group": logging.wandb_group or run.condition.label,
        "wandb_tags": ",".join(dict.fromkeys([*tags, label, f"seed{run.seed}"])),
    }


def run_environ(
    tables: Mapping[str, Mapping[str, Any]], keys: tuple[Key, ...], environ: Mapping[str, str]
) -> dict[str, str]:
    """Variables of the run that differ from the campaign's.

    Values that `config_text` hides, so that no file holds them, are passed as `RETRAIN__TABLE__KEY`. Variables of that
    form in the campaign's environment are resolved already: they are set to the run's value, so that they do not
    override a condition.
    """
    public = hide(tables)
    given = [variable for variable in environ if variable.startswith(ENV_PREFIX)]
    variables = {}
    for key in keys:
        name = f"{ENV_PREFIX}{key.table}__{key.name}".upper()
        value = tables.get(key.table, {}).get(key.name)
        if value != public.get(key.table, {}).get(key.name):
            variables[name] = _text(value)
        elif same := [variable for variable in given if variable.upper() == name]:
            own = key.default if value is None else value
            if own is not None:
                variables |= dict.fromkeys(same, _text(own))
    return variables


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


ERROR_HEAD = re.compile(r"retrain: \w+ error")
# The last error is at the end of a log that may have grown to gigabytes.
TAIL_BYTES = 65536
REASON_CHARS = 300


class State(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    NOT_NEEDED = "not needed"  # of a run that the planned looks saved


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """Steps done, and the correct rate of the last one, from the last whole line of `metrics.jsonl`."""

    steps_done: int = 0
    correct_rate: float | None = None


def is_done(run: PlannedRun) -> bool:
    """True if the run has reached its last step and saved its adapter."""
    manifest = _manifest(run.folder)
    # A tuning run that continues after a decision was done with fewer steps.
    steps = table_of(manifest, "config", "training").get("max_steps", run.max_steps)
    return manifest.get("status") == "done" and steps >= run.max_steps and (Run(run.folder).adapters / FINAL).is_dir()


def can_continue(run: PlannedRun) -> bool:
    """True to `--resume` the run: it was interrupted, or failed with a valid checkpoint.

    A run that failed before its first checkpoint starts again; its records are moved aside.
    """
    manifest = _manifest(run.folder)
    if manifest.get("status") != "failed":
        return bool(manifest)
    checkpoint, _ = newest_valid(Run(run.folder).adapters)
    return checkpoint is not None


def reason_of_failure(run: PlannedRun, code: int) -> str:
    """Exit code or signal, and the last error of the run, in one line."""
    known = {int(each): each.name for each in signal.Signals}
    head = f"killed by {known.get(-code, f'signal {-code}')}" if code < 0 else f"exit {code}"
    error = str(_manifest(run.folder).get("error") or "") or _last_error(run.folder / "stderr.log")
    shown = " ".join(printable(hide_text(error)).split())
    return f"{head}: {shown[:REASON_CHARS]}" if shown else head


def progress(folder: Path) -> RunProgress:
    """Progress of a run; only the end of `metrics.jsonl` is read."""
    with suppress(ConfigError, ValueError, KeyError, TypeError):
        record = Run(folder).last_step(skip_damaged=True)
        return RunProgress(steps_done=max(0, int(record["step"]) + 1), correct_rate=record.get("correct_rate"))
    return RunProgress()


def recorded_code(folder: Path) -> int:
    """The exit code of a run that has ended, from its records: SIGKILL for one that could not record its end."""
    status = str(_manifest(folder).get("status"))
    codes = {"done": EXIT_DONE, "failed": EXIT_FAILED, "stopped": EXIT_RESUMABLE}
    return codes.get(status, -int(signal.SIGKILL))


class Adopted:
    """A run that an earlier session started and that is still alive: it is awaited, not started twice."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.pid: int | None = max(owner_of(folder), 0) or None

    def poll(self) -> int | None:
        return None if owner_of(self._folder) else recorded_code(self._folder)

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        if (pid := owner_of(self._folder)) > 0:
            with suppress(OSError):
                os.kill(pid, number)


def _manifest(folder: Path) -> Mapping[str, Any]:
    try:
        return Run(folder).started_manifest()
    except ResumeError:
        return {}


def _last_error(file: Path) -> str:
    """The first problem of the last error that retrain printed, otherwise the last line (of a traceback, say)."""
    tail = b""
    with suppress(OSError), open_regular(file) as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
        tail = stream.read()
    lines = [line.strip() for line in tail.decode("utf-8", "replace").splitlines()]
    texts = [line for line in lines if line and not line.startswith("fix:")]
    heads = [number for number, line in enumerate(texts[:-1]) if ERROR_HEAD.fullmatch(line)]
    return texts[heads[-1] + 1].removeprefix("1. ") if heads else (texts[-1] if texts else "")
