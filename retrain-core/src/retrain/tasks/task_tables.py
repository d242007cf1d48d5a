"""Reads `[[data.tasks]]`: each task is the run's configuration with the task's data, reward and environment."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from retrain.kernel.config.keys import Table, key
from retrain.kernel.config.plugin_tables import EnvironmentTable, SetsKeys
from retrain.kernel.config.resolved import Config, Layer, Origin
from retrain.kernel.errors import Problem
from retrain.tasks.derived import derived

HEAD = re.compile(r"\s*\[\[\s*data\s*\.\s*tasks\s*\]\]")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
OF_TASKS = ("data", "reward", "environment")  # tables that each task has
# `eval_held_out_...` and `eval_weighted_...` are fields of all tasks together.
TAKEN = ("held_out", "weighted")
# Each task names its own; the other keys of [data] apply to every task that does not set them.
OF_A_TASK = ("source", "path", "prompt_key", "answer_key", "messages_key", "options")


class TaskKeys(Table):
    """`[[data.tasks]]`, in addition to the keys of `[data]`; an absent key has the run's value."""

    name: str = key("", "Name of the task in metrics, records and verdicts.")
    weight: float | None = key(None, "Share of the prompts, relative to the other tasks; 1 without it.", gt=0.0)
    held_out: int | None = key(None, "Held-out examples of this task; [eval] examples without it.", ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTable:
    """A task with its name and configuration; its share goes by `weight` times size^`power`.

    `place` is the location to show in messages.
    """

    name: str
    weight: float
    power: float
    config: Config
    place: str


def read_tasks(config: Config) -> tuple[list[TaskTable], list[Problem]]:
    """Return the tasks of a run, empty where it is its only task, and every problem with their tables."""
    tasks, problems = list[TaskTable](), [*_contradictions(config)]
    path, lines, data = config.place("data.tasks"), list[int](), config.data
    power = {"proportional": 1.0, "temperature": 1.0 / data.schedule_temperature}.get(data.schedule, 0.0)
    if config.origin("data.tasks").layer is Layer.FILE:
        with suppress(OSError, ValueError):
            text = Path(config.source).read_text(encoding="utf-8")
            lines = [number for number, line in enumerate(text.split("\n"), 1) if HEAD.match(line)]
    for number, values in enumerate(config.data.tasks):
        line = f"{config.source}:{lines[number]}" if number < len(lines) else path
        place = f"{line} [[data.tasks]] {values.get('name', number + 1)}"
        own, reading, faults = derived(values, TaskKeys, config, place, tables=OF_TASKS[1:])
        problems += faults
        if isinstance(own, TaskKeys) and not faults:
            weight, tables, origins = own.weight or 1.0, dict(reading.tables), dict(reading.origins)
            if own.held_out is not None:
                tables["eval"] = config.eval.model_copy(update={"examples": own.held_out})
                origins["eval.examples"] = Origin(layer=Layer.FILE, place=f"{place} held_out, as")
            reading = replace(reading, tables=tables, origins=origins)
            tasks.append(TaskTable(name=own.name, weight=weight, power=power, config=reading, place=place))
    return tasks, [*problems, *_names(config, tasks)]


def _names(config: Config, tasks: list[TaskTable]) -> Iterator[Problem]:
    seen, sets = Counter(task.name for task in tasks), config.table("eval", SetsKeys).sets
    for task in tasks:
        name, where = task.name, f"{task.place} name"
        if not NAME.fullmatch(name) or name in TAKEN:
            what, fix = f"{name!r} cannot be a task's name", f"use letters, digits and _; taken: {', '.join(TAKEN)}"
            why = "it becomes part of the names of metrics"
            yield Problem(code="data.bad-task-name", where=where, what=what, why=why, fix=fix)
        elif seen[name] > 1 or name in sets:
            what, why = f"another task or set has the name {name!r}", "metrics, records and verdicts go by it"
            yield Problem(code="data.task-name-twice", where=where, what=what, why=why, fix="give it another name")


def _contradictions(config: Config) -> Iterator[Problem]:
    """Keys for a single task, and weights together with another schedule."""
    single = [("data", name) for name in OF_A_TASK] + [("environment", name) for name in EnvironmentTable.model_fields]
    for table, name in single:
        field = type(getattr(config, table)).model_fields[name]
        # A run writes every key to its config.toml, so only another value contradicts.
        if getattr(getattr(config, table), name) != field.get_default(call_default_factory=True):
            what, why, fix = "contradicts [[data.tasks]]", "each task has its own", "move it to the tasks, or remove it"
            where = config.place(f"{table}.{name}")
            yield Problem(code="data.single-task-key", where=where, what=what, why=why, fix=fix)
    weighted = [each for each in config.data.tasks if "weight" in each]
    if weighted and config.data.schedule != "weight":
        what = f"schedule = {config.data.schedule!r} sets the shares, and task {weighted[0].get('name')} has a weight"
        where, fix = config.place("data.schedule"), "remove the weights, or the schedule"
        yield Problem(code="data.weight-and-schedule", where=where, what=what, fix=fix)
