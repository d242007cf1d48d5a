"""The alarms of a run as text for a report: what was paid and not confirmed, and the tokens it is known by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from retrain.kernel.errors import ConfigError
from retrain.observe.gaming.alarm_record import read_alarms

MOST_SHOWN = 5  # completions of an alarm
MOST_CHARS = 300


def alarm_text(run: Path) -> str:
    """Every alarm with its most credited completions; empty without one. A damaged file is said to be one."""
    try:
        return "\n\n".join("\n".join(_lines(alarm)) for alarm in read_alarms(run))
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        return f"gaming.jsonl cannot be read: {error}"


def _lines(alarm: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"Step {alarm['step']}: since step {alarm['since']} the reward paid {alarm['num_completions']} completions "
        f"that its shadow does not confirm (evidence {alarm['evidence']:.3g}; the alarm begins at 20)."
    )
    if alarm["tokens"]:
        yield f"Their credit is on {' | '.join(repr(each['token']) for each in alarm['tokens'])}"
    for each in alarm["completions"][:MOST_SHOWN]:
        text = " ".join(str(each["completion"]).split())
        place = f"step {each['step']}, group {each['group']}, completion {each['index']}"
        yield f"{place}, reward {each['reward']:g}, shadow {each['shadow_reward']:g}: {text[:MOST_CHARS]}"
    yield "All of them are in gaming.jsonl."
