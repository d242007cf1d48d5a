"""Checks a free table of parameters against the model that a plugin declared for it."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from retrain.kernel.errors import Problem


def validated_params(
    model: type[BaseModel] | None, given: Mapping[str, Any], *, where: str
) -> tuple[BaseModel | None, list[Problem]]:
    """The parameters as the plugin's model, or every problem with them; without a model anything goes."""
    if model is None:
        return None, []
    try:
        return model.model_validate(dict(given)), []
    except ValidationError as error:
        return None, [_problem(detail, model, where) for detail in error.errors()]


def _problem(detail: Any, model: type[BaseModel], where: str) -> Problem:
    name = ".".join(str(part) for part in detail["loc"])
    if detail["type"] != "extra_forbidden":
        return Problem(
            where=f"{where}.{name}", what=detail["msg"].removeprefix("Value error, "), fix="correct the value"
        )
    near = get_close_matches(name, model.model_fields, n=1)
    known = ", ".join(model.model_fields) or "none"
    return Problem(where=where, what=f"unknown option {name!r}", fix=f"use {near[0]!r}" if near else f"known: {known}")
