"""What a campaign tells the ledger: that it was opened, its sealed plan, each attempt of a run, and how it ended.

The ledger never stops a campaign: where it cannot be written the campaign goes on, and says so once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrain.campaign.report_lines import Lines

GOES_ON = "note: not in the ledger: {}. The campaign goes on; `retrain compare` will say what is unknown"


class CampaignRecord:
    """Appends events of one session of a campaign to the ledger in the folder that holds the campaign's.

    `continues`: an earlier session began it.
    """

    def __init__(self, folder: Path, lines: Lines, *, continues: bool = False) -> None:
        self._path, self._lines = folder, lines
        self._continues, self._is_refused = continues, False

    def opened(self, manifest: Mapping[str, Any], *, is_new: bool, is_beyond_plan: bool) -> None:
        """The campaign begins, goes on or grows; `manifest` is that of this session, written to disk.

        `is_new` says that `--new` asked for another folder.
        """
        plan = manifest.get("plan")
        self._append(
            "campaign_opened",
            content=str(manifest.get("sha256", "")),
            plan=str(plan["sha256"]) if plan else "",
            question=self._question(plan),
            cells=self._cells(manifest),
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
        try:
            from retrain.verdicts.ledger.chain import append  # only a session of a campaign needs it
            from retrain.verdicts.ledger.place import ledger_folder, name_in

            folder = ledger_folder(self._path)
            reason = append(folder, kind, campaign=name_in(folder, self._path), **fields)
        except ModuleNotFoundError as error:  # an installation without that package
            reason = str(error)
        if reason and not self._is_refused:
            self._is_refused = True
            self._lines.say(GOES_ON.format(reason), logging.WARNING)

    def _cells(self, manifest: Mapping[str, Any]) -> str:
        try:
            from retrain.verdicts.ledger.place import cells_of
        except ModuleNotFoundError:  # told with the first event
            return ""
        return cells_of(manifest)

    def _question(self, plan: Mapping[str, Any] | None) -> str:
        try:
            from retrain.verdicts.ledger.place import question_of
        except ModuleNotFoundError:  # told with the first event
            return ""
        return question_of(plan) if plan else ""
