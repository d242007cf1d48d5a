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
# Keys of [data] about the tasks of a run: a single task or set does not have them.
OF_A_RUN = ("tasks", "schedule", "dead_")
# The text of `NAME = "..."` sets this key of the table NAME.
SHORT = {"reward": "type", "environment": "provider"}


def derived(
    values: Mapping[str, Any], own: type[BaseModel], config: Config, place: str, *, tables: Sequence[str]
) -> tuple[BaseModel | None, Config, list[Problem]]:
    """Return the keys of `own`, the run's configuration with the others, and every problem with them.

    Keys of `[data]` are given directly, other `tables` below their names. An absent key has the run's value. `place`
    is the location to show in messages.
    """
    below = {name: values[name] for name in tables if name in values}
    keys = {key: value for key, value in values.items() if key in own.model_fields}
    named = {key: value for key, value in values.items() if key not in {*keys, *below}}
    is_other = named.get("source", config.data.source) != config.data.source
    kept = PRESENTATION if is_other else tuple(type(config.data).model_fields)
    inherited = {key: getattr(config.data, key) for key in kept if not key.startswith(OF_A_RUN)}
    given: dict[str, Mapping[str, Any]] = {"data": inherited | named}
    given |= {name: each if isinstance(each, Mapping) else {SHORT[name]: each} for name, each in below.items()}
    found, problems = validated_params(own, keys, where=place)
    for key in (key for key in named if key.startswith(OF_A_RUN)):
        what, fix = f"{key} is a key of the run", "move it to [data]"
        problems.append(Problem(code="data.key-of-run", where=f"{place} {key}", what=what, fix=fix))
    changed = dict(config.tables)
    origins = {path: each for path, each in config.origins.items() if path.partition(".")[0] not in below}
    for name, table in given.items():
        where = place if name == "data" else f"{place} {name}"
        model, faults = validated_params(type(getattr(config, name)), table, where=where)
        changed |= {name: model} if model else {}
        problems += faults
        moved = named if name == "data" else table
        origins |= {f"{name}.{key}": Origin(layer=Layer.FILE, place=f"{place}, as") for key in moved}
    return found, replace(config, tables=changed, origins=origins), problems
