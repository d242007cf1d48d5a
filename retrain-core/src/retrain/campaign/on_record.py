"""Tells the ledger about a campaign: its opening, its sealed plan, each attempt of a run, and its end.

A ledger that cannot be written stops nothing: the campaign continues, and says so once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrain.campaign.report_lines import Lines
from retrain.verdicts.ledger.campaigns import cells_of, question_of
from retrain.verdicts.ledger.chain import append, ledger_folder, name_in

GOES_ON = "note: not in the ledger: {}. The campaign goes on; `retrain compare` will say what is unknown"


class CampaignRecord:
    """Appends the events of one session; `continues`: an earlier session began the campaign."""

    def __init__(self, folder: Path, lines: Lines, *, continues: bool = False) -> None:
        self._path, self._lines = folder, lines
        self._continues, self._is_refused = continues, False

    def opened(self, manifest: Mapping[str, Any], *, is_new: bool, is_beyond_plan: bool) -> None:
        """The campaign begins, continues or grows; `is_new`: `--new` requested another folder."""
        plan = manifest.get("plan")
        self._append(
            "campaign_opened",
            content=str(manifest.get("sha256", "")),
            plan=str(plan["sha256"]) if plan else "",
            question=question_of(plan) if plan else "",
            cells=cells_of(manifest),
            new=is_new,
            continued=self._continues,
            beyond_plan=is_beyond_plan,
            runs=len(manifest["runs"]),
        )
        if plan and not self._continues:
            self._append("plan_sealed", plan=dict(plan))

    def attempt(self, run: str, number: int, *, continues: bool) -> None:
        """An attempt of a run starts; `continues`: from a checkpoint."""
        self._append("attempt_started", run=run, attempt=number, continues=continues)

    def ended(self, state: str, *, done: int, failed: int) -> None:
        """The session ended."""
        self._append("campaign_ended", state=state, done=done, failed=failed)

    def _append(self, kind: str, **fields: Any) -> None:
        folder = ledger_folder(self._path)
        reason = append(folder, kind, campaign=name_in(folder, self._path), **fields)
        if reason and not self._is_refused:
            self._is_refused = True
            self._lines.say(GOES_ON.format(reason), logging.WARNING)
