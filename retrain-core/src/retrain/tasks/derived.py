"""A run's configuration with other data, rewards or environment: of one of `[[data.tasks]]`, of an evaluation set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from retrain.kernel.config.resolved import Config, Layer, Origin
from retrain.kernel.errors import Problem
from retrain.kernel.plugins.resolve import validated_params

# The other keys of [data] belong to its source and do not apply to another one.
PRESENTATION = ("instruction", "system_prompt", "template_args", "thinking", "sampler", "sampler_params")
# The text of `NAME = "..."` sets this key of the table NAME.
SHORT = {"reward": "type", "environment": "provider"}


def derived(
    values: Mapping[str, Any], own: type[BaseModel], config: Config, place: str, *, tables: Sequence[str]
) -> tuple[BaseModel | None, Config, list[Problem]]:
    """Return the keys of `own`, the run's configuration with the others, and every problem with them.

    Keys of `[data]` are given as they are, other `tables` below their names. An absent key has the run's value. `place`
    is the location to show in messages.
    """
    data_model, moved = type(config.data), list[str]()
    below = {name: values[name] for name in tables if name in values}
    keys = {key: value for key, value in values.items() if key in own.model_fields}
    named = {key: value for key, value in values.items() if key not in {*keys, *below}}
    is_other = named.get("source", config.data.source) != config.data.source
    kept = PRESENTATION if is_other else tuple(data_model.model_fields)
    inherited = {key: getattr(config.data, key) for key in kept if not key.startswith(TASK_KEYS)}
    found, problems = validated_params(own, keys, where=place)
    changed: dict[str, BaseModel | None] = {}
    if tasks_keys := [key for key in named if key.startswith(TASK_KEYS)]:
        what, fix = f"{tasks_keys[0]} is a key of the run", "move it to [data]"
        problems.append(Problem(code="data.key-of-run", where=f"{place} {tasks_keys[0]}", what=what, fix=fix))
        named = {key: value for key, value in named.items() if key not in tasks_keys}
    changed["data"], faults = validated_params(data_model, inherited | named, where=place)
    moved += [f"data.{key}" for key in named]
    for name, given in below.items():
        given = given if isinstance(given, Mapping) else {SHORT[name]: given}
        changed[name], more = validated_params(type(getattr(config, name)), given, where=f"{place} {name}")
        faults += more
        moved += [f"{name}.{key}" for key in given]
    origin = Origin(layer=Layer.FILE, place=f"{place}, as")
    origins = {path: each for path, each in config.origins.items() if path.partition(".")[0] not in below}
    models: dict[str, BaseModel] = {name: model for name, model in changed.items() if model is not None}
    result = replace(config, tables={**config.tables, **models}, origins={**origins, **dict.fromkeys(moved, origin)})
    return found, result, problems + faults


# Keys of [data] about the tasks of a run, which a single task or set does not have.
TASK_KEYS = ("tasks", "schedule", "dead_")
