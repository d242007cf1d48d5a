"""Which control of its condition a run is, by its record."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from retrain.records.reading import table_of


class Control(StrEnum):
    """What a control takes away from the run that it is a copy of; evaluation keeps the true verifier in all three."""

    RANDOM_REWARD = "random_reward"  # training is rewarded by the toss of a seeded coin
    FORMAT_ONLY = "format_only"  # training is rewarded for an answer that the verifier can read, right or wrong
    NO_UPDATE = "no_update"  # everything but the optimizer step


def control_label(label: str, control: Control) -> str:
    """`maxrl+none+random_reward`: the label of a condition's control."""
    return f"{label}+{control}"


def control_of_record(record: Mapping[str, Any]) -> Control | None:
    """The control that a run was, by its `run.json`; None for an ordinary run."""
    name = table_of(record, "config", "training").get("control")
    return next((each for each in Control if each == name), None)
