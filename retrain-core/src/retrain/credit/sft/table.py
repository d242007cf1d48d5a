"""`[sft]`: supervised steps before the first one."""

from __future__ import annotations

from typing import Any

from retrain.kernel.config.keys import Table, key
from retrain.kernel.types import Kind

REFERENCE = "reference"


class SftTable(Table):
    """Training on given answers before the first step."""

    steps: int = key(0, "Supervised steps before the first step; 0 = none.", ge=0)
    source: str = key(
        "", "Data source of prompts and answers; empty = the run's own.", names=Kind.DATA_SOURCE, needs="sft.steps"
    )
    path: str = key("", "As [data] path, for this source.", reads="data", needs="sft.steps")
    options: dict[str, Any] = key({}, "As [data.options], for this source.", needs="sft.steps")
    answer: str = key(
        REFERENCE, "What is trained: `reference`, or the column of a worked solution.", min_length=1, needs="sft.steps"
    )
    batch_size: int = key(32, "Examples per supervised step.", ge=1, needs="sft.steps")
    lr: float = key(0.0, "Learning rate of the supervised steps; 0 = [training] lr.", ge=0.0, needs="sft.steps")
