"""Records looks at a campaign that has not ended, by any command that shows results of its runs.

Stopping, adding seeds or starting again after such a look is a choice by results. A look is recorded once for the same
finished runs and the same command, so repeating it costs one read of the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from retrain.kernel.config.toml_file import open_regular
from retrain.kernel.errors import ConfigError
from retrain.records.reading import parse_record, read_object
from retrain.records.record_names import CAMPAIGN_FILE
from retrain.records.run import is_run
from retrain.records.runs.campaign_status import CampaignStatus, read_campaign
from retrain.records.runs.run_status import DONE
from retrain.verdicts.ledger.chain import NAME, append
from retrain.verdicts.ledger.looks import LOOK, UNRECORDED, is_on_record
from retrain.verdicts.ledger.place import ledger_folder, name_in

LEVELS = 5  # from a checkpoint's folder up to its campaign
Say = Callable[[str], object]


class InterimLooks:
    """Records unfinished campaigns shown by one command, `by`; `say` gets a line where that cannot be written."""

    def __init__(self, by: str, say: Say) -> None:
        self._by, self._say = by, say
        self._known: list[dict[str, Any]] = []

    def at(self, paths: Iterable[Path]) -> None:
        """Record that the command shows these campaigns, runs or checkpoints."""
        for folder in dict.fromkeys(each for path in paths if (each := campaign_of(path))):
            if not _has_ended(folder) and (status := read_campaign(folder)):
                self.of(status)

    def of(self, campaign: CampaignStatus) -> None:
        """Record that the command shows this campaign; nothing for one that is done, or has no step."""
        if campaign.state == DONE or not any(run.status and run.status.step for run in campaign.runs):
            return
        ended = [run for run in campaign.runs if run.seed is not None and run.status and run.status.state == DONE]
        done = {label: [run.seed for run in ended if run.condition == label] for label in campaign.conditions}
        folder = ledger_folder(campaign.path)
        look = {"campaign": name_in(folder, campaign.path), "by": self._by, "seeds": done}
        if look in self._known:
            return
        self._known.append(look)
        if not _is_recorded(folder, look) and (reason := append(folder, LOOK, **look)):
            self._say(f"note: {UNRECORDED.format(reason)}")


def campaign_of(path: Path) -> Path | None:
    """Return the campaign that a path is, or lies in; None if there is none."""
    full = path.expanduser().resolve()
    for folder in (full, *full.parents[:LEVELS]):
        if (folder / CAMPAIGN_FILE).is_file() and not is_run(folder):
            return folder
    return None


def _has_ended(folder: Path) -> bool:
    """True if the manifest says that every run is done, so that none of them needs to be read."""
    try:
        return read_object(folder / CAMPAIGN_FILE).get("status") == DONE
    except ConfigError:
        return True


def _is_recorded(folder: Path, look: dict[str, Any]) -> bool:
    mark, looks = f'"kind": "{LOOK}"'.encode(), []
    with suppress(OSError, ValueError, RecursionError), open_regular(folder / NAME) as stream:
        looks = [parse_record(line) for line in stream if mark in line and line.endswith(b"\n")]
    return is_on_record(looks, look)
