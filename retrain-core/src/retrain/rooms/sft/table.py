"""`[sft]`: supervised steps before the first one."""

from __future__ import annotations

from typing import Any

from retrain.kernel.config.keys import Table, key
from retrain.kernel.types import Kind

REFERENCE = "reference"


class SftTable(Table):
    """Training on given answers before the first step."""

    steps: int = key(0, "Supervised steps before the first step; 0 = none.", ge=0)
    source: str = key("", "Data source of prompts and answers; empty = the run's own.", names=Kind.DATA_SOURCE)
    path: str = key("", "As [data] path, for this source.", reads="data")
    options: dict[str, Any] = key({}, "As [data.options], for this source.")
    answer: str = key(REFERENCE, "What is trained: `reference`, or the column of a worked solution.", min_length=1)
    batch_size: int = key(32, "Examples per supervised step.", ge=1)
    lr: float = key(0.0, "Learning rate of the supervised steps; 0 = [training] lr.", ge=0.0)
