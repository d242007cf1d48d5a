"""Time and memory of earlier runs with the same model and settings on this machine."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import ConfigError
from retrain.records.run import Run, is_run
from retrain.tools.capacity.machine import device_kind

MAX_DEPTH = 4  # logs/campaign/runs/NAME/run.json
MAX_RUNS = 2000
# What memory and time depend on: a past run that agrees in these did the same work.
SAME_WORK = (
    ("model", "model"),
    ("model", "lora_rank"),
    ("backend", "backend"),
    ("backend", "devices"),
    ("backend", "options"),
    ("training", "batch_size"),
    ("training", "group_size"),
    ("training", "max_tokens"),
    ("training", "minibatches"),
    ("training", "epochs"),
    ("training", "refill"),
    ("inference", "engine"),
    ("inference", "dtype"),
    ("inference", "kv_cache_dtype"),
    ("model", "dtype"),
)
# Keys that the oldest runs lack, and what those did.
ADDED_LATER = {
    ("model", "dtype"): "auto",
    ("training", "minibatches"): 1,
    ("training", "epochs"): 1,
    ("training", "refill"): 0,
}
SAME_PROCESS = SAME_WORK[:1] + SAME_WORK[2:4]  # what the memory of an idle process depends on


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """Medians over past runs, None if unknown; `runs` counts those with the same work on this machine."""

    runs: int = 0
    median_step_time_s: float | None = None
    peak_memory_bytes: int | None = None
    memory_at_start_bytes: int | None = None
    prompt_tokens: int | None = None
    eval_completion_s: float | None = None


def past_runs(config: Config, folder: Path) -> Past:
    """Read the `run.json` files below a folder for runs of this configuration; damaged ones are skipped."""
    same_work: list[Mapping[str, Any]] = []
    same_process: list[Mapping[str, Any]] = []
    now = config.as_dict()
    for manifest in _manifests(folder):
        capacity = manifest.get("capacity")
        measured = capacity.get("measured") if isinstance(capacity, dict) else None
        if not isinstance(measured, dict) or not _is_here(manifest):
            continue
        if _agree(manifest, now, SAME_PROCESS):
            same_process.append(measured)
            if _agree(manifest, now, SAME_WORK):
                same_work.append(measured)
    each_s = [{"s": eval_completion_s(measured, now)} for measured in same_work]  # they agree on the size of a step
    return Past(
        runs=len(same_work),
        median_step_time_s=_median(same_work, "median_step_time_s"),
        peak_memory_bytes=_whole(_median(same_work, "peak_memory_bytes")),
        memory_at_start_bytes=_whole(_median(same_process, "memory_at_start_bytes")),
        prompt_tokens=_whole(_median(same_process, "longest_prompt_tokens")),
        eval_completion_s=_median(each_s, "s"),
    )


def eval_completion_s(measured: Mapping[str, Any], config: Mapping[str, Any]) -> float | None:
    """Seconds for one completion of an evaluation: measured, or the time that a step took to sample one."""
    shares, training = measured.get("time_shares"), config["training"]
    share: Any = shares.get("sample") if isinstance(shares, dict) else None
    measured_s: Any = measured.get("eval_completion_time_s")
    step_s: Any = measured.get("median_step_time_s")
    if _is_number(measured_s):
        return float(measured_s)
    is_known = _is_number(share) and _is_number(step_s)
    return share * step_s / (training["batch_size"] * training["group_size"]) if is_known else None


def _manifests(folder: Path) -> Iterator[Mapping[str, Any]]:
    for count, run in enumerate(_runs(folder, MAX_DEPTH)):
        if count == MAX_RUNS:
            return
        with suppress(ConfigError):
            yield run.manifest


def _runs(folder: Path, depth: int) -> Iterator[Run]:
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    if is_run(folder):
        yield Run(folder)
    elif depth:
        for entry in entries:
            if entry.is_dir() and not entry.is_symlink():
                yield from _runs(entry, depth - 1)


def _is_here(manifest: Mapping[str, Any]) -> bool:
    hardware = manifest.get("hardware")
    wanted = {"machine": platform.machine(), "cores": os.cpu_count()}
    return isinstance(hardware, dict) and all(hardware.get(name) == value for name, value in wanted.items())


def _agree(manifest: Mapping[str, Any], now: Mapping[str, Any], keys: tuple[tuple[str, str], ...]) -> bool:
    before = manifest.get("config")
    if not isinstance(before, dict):
        return False
    return all(_value(before, table, name) == _value(now, table, name) for table, name in keys)


def _value(config: Mapping[str, Any], table: str, name: str) -> Any:
    """A value of a configuration; a GPU that this machine lacks is the CPU that a run takes instead."""
    values = config.get(table)
    value = values.get(name, ADDED_LATER.get((table, name))) if isinstance(values, dict) else None
    if name != "devices" or not isinstance(value, str):
        return value
    return [each if device_kind(each) == "cuda" else "cpu" for each in map(str.strip, value.split(","))]


def _median(found: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [record[name] for record in found if _is_number(record.get(name))]
    return statistics.median(values) if values else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e18


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
