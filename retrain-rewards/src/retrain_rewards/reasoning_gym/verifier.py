"""Scores answers with a data set's own verifier."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from retrain.api import Example, Score
from retrain_rewards.boxed import boxed, last_boxed
from retrain_rewards.reasoning_gym.guards import affirms_one, harmless
from retrain_rewards.reasoning_gym.library import make_data_set
from retrain_rewards.reasoning_gym.plain import from_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class GymReward:
    """The data set's own `score_answer` of the last box, usually in [0, 1]; 0.0 without a box.

    It holds plain data only, and the scoring process builds the data set on first use. Answers that a verifier would
    evaluate as code count as empty, and so do hedges and negations, which many verifiers read over (see `guards`).
    """

    name: str
    config: str  # JSON text of the data set's configuration, seed and size included

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any]) -> GymReward:
        """The verifier of a data set."""
        return cls(name=name, config=json.dumps(dict(config), sort_keys=True))

    def score(self, example: Example, text: str) -> Score:
        """Score one completion; an exception of the library is a failed score, not a verdict."""
        answer = last_boxed(text)
        if answer is None:
            return Score.of(0.0)
        entry = from_plain(example.info["entry"])
        right = entry["answer"] if isinstance(entry["answer"], str) else ""
        data_set = entry["metadata"].get("source_dataset", self.name)
        if not harmless(data_set, answer) or (right and not affirms_one(answer, right)):
            answer = ""
        return Score.of(_data_set(self.name, self.config).score_answer(answer, entry))

    def answer_in(self, text: str) -> str | None:
        """The last box of a completion."""
        return last_boxed(text)

    def gold(self, example: Example) -> str | None:
        """The entry's own answer in a box; None when it has none, or one that a box cannot hold (a lone brace)."""
        answer = from_plain(example.info["entry"])["answer"]
        if not isinstance(answer, str) or not answer.strip():
            return None
        return boxed(answer) if last_boxed(boxed(answer)) == answer.strip() else None


@lru_cache(maxsize=8)
def _data_set(name: str, config: str) -> Any:
    return make_data_set(name, json.loads(config))
