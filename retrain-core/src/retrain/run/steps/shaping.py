"""Shapers of plugins: what goes wrong in one is reported with its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrain.kernel.contracts.algorithm import Shaper
from retrain.kernel.errors import HookError, Problem, RetrainError
from retrain.kernel.types import Group
from retrain.text.raised_at import raised_at

FIX = "correct that plugin, or leave it out with RETRAIN_BLOCK=distribution"


class NamedShaper:
    """A shaper whose errors and faulty results become a HookError that says which class of which module it is."""

    def __init__(self, shaper: Shaper) -> None:
        self._shaper = shaper

    def __str__(self) -> str:
        kind = type(self._shaper)
        return f"shaper {kind.__module__}.{kind.__qualname__}"

    def shape(self, step: int, groups: tuple[Group, ...]) -> tuple[tuple[Group, ...], Mapping[str, float]]:
        """What the shaper returns, provided that it is the same groups in the same order, and fields."""
        try:
            result = self._shaper.shape(step, groups)
        except RetrainError:
            raise
        except Exception as error:
            what = f"{self} raised {type(error).__name__}: {error}{raised_at(error)}"
            raise HookError(Problem(what=what, fix=FIX)) from error
        match result:
            case [[*shaped], Mapping() as fields] if list(map(_example, shaped)) == list(map(_example, groups)):
                return tuple(shaped), fields
        what = f"{self} did not return the {len(groups)} groups that it was given, in their order, and its fields"
        raise HookError(Problem(what=what, fix="return (tuple of all groups, dict of fields)"))


def _example(group: Any) -> int:
    return id(getattr(group, "example", None))
