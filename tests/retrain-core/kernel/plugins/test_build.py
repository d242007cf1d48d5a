"""Parameters of a plugin, validated against the model that it declares."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from retrain.kernel.plugins.resolve import validated_params


class Params(BaseModel):
    """A strict model, as the documentation tells plugins to write them."""

    model_config = ConfigDict(extra="forbid", strict=True)
    scale: float = Field(1.0, gt=0.0)
    names: list[str] = Field(default_factory=list)


def test_good_parameters_are_given_as_the_model() -> None:
    params, problems = validated_params(Params, {"scale": 2}, where="x")
    assert problems == []
    assert params == Params(scale=2.0)


def test_without_a_model_anything_goes() -> None:
    assert validated_params(None, {"whatever": object()}, where="x") == (None, [])


@pytest.mark.parametrize(
    ("given", "where", "text", "fix"),
    [
        ({"scal": 2.0}, "here", "unknown option 'scal'", "use 'scale'"),
        ({"zzz": 2.0}, "here", "unknown option 'zzz'", "known: scale, names"),
        ({"scale": "2"}, "here.scale", "valid number", "correct the value"),
        ({"scale": -1.0}, "here.scale", "greater than 0", "correct the value"),
        ({"names": ["a", 3]}, "here.names.1", "valid string", "correct the value"),
    ],
)
def test_bad_parameters_are_reported_with_their_place(given: dict[str, Any], where: str, text: str, fix: str) -> None:
    params, (problem,) = validated_params(Params, given, where="here")
    assert params is None
    assert (problem.where, problem.fix) == (where, fix)
    assert text in problem.what


def test_all_bad_parameters_are_reported_together() -> None:
    _, problems = validated_params(Params, {"scale": -1.0, "zzz": 1, "names": 3}, where="here")
    assert len(problems) == 3
