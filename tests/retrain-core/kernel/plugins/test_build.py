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


@pytest.mark.parametrize(
    ("given", "where", "code", "fix"),
    [
        ({"scal": 2.0}, "here", "plugin.unknown-option", "use 'scale'"),
        ({"zzz": 2.0}, "here", "plugin.unknown-option", "known: scale, names"),
        ({"scale": "2"}, "here.scale", "plugin.bad-option", "correct the value"),
        ({"scale": -1.0}, "here.scale", "plugin.bad-option", "correct the value"),
        ({"names": ["a", 3]}, "here.names.1", "plugin.bad-option", "correct the value"),
    ],
)
def test_bad_parameters_are_reported_with_their_place(given: dict[str, Any], where: str, code: str, fix: str) -> None:
    params, (problem,) = validated_params(Params, given, where="here")
    assert params is None
    assert (problem.where, problem.code, problem.fix) == (where, code, fix)


def test_good_parameters_are_the_model_any_pass_without_one_and_all_bad_ones_are_reported() -> None:
    assert validated_params(Params, {"scale": 2}, where="x") == (Params(scale=2.0), [])
    assert validated_params(None, {"whatever": object()}, where="x") == (None, [])
    assert len(validated_params(Params, {"scale": -1.0, "zzz": 1, "names": 3}, where="here")[1]) == 3
