"""The reward `none`: nothing is judged, because something else teaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from retrain.api import Example, PluginContext, Score


@dataclass(frozen=True, slots=True)
class NoReward:
    """No verdict on any completion, for runs that learn from a teacher; needs no reference and no process."""

    gives_verdicts: ClassVar[bool] = False

    async def score(self, example: Example, text: str) -> Score:
        return Score.no_verdict("reward none judges nothing")


def make_none(context: PluginContext) -> NoReward:
    return NoReward()
