"""The records of a campaign: `manifest.json`, rewritten whenever something changes, and the events of the ledger.

The entry of a run is encoded when it changes: of thousands of runs, few change between two writings.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from retrain.campaign.load import Campaign, sealed_plan
from retrain.campaign.planned import PlannedRun, State
from retrain.campaign.report_lines import Lines
from retrain.kernel.version import __version__
from retrain.records.files import hash_of, reported, write_text
from retrain.records.record_names import CAMPAIGN_FILE
from retrain.text.secrets import hide, redacted_json
from retrain.verdicts.ledger.campaigns import cells_of, question_of
from retrain.verdicts.ledger.chain import append, ledger_folder, name_in


class Manifest:
    """The manifest of a running campaign. `save` writes all changes since the last one at once."""

    def __init__(self, folder: Path, content: dict[str, Any]) -> None:
        self._file = folder / CAMPAIGN_FILE
        self.content = content
        self._entries: dict[str, dict[str, Any]] = {entry["run_name"]: entry for entry in content["runs"]}
        self._encoded: dict[str, str] = {}  # entries as text; changed ones are missing
        self._is_changed = True

    def run(self, name: str) -> Mapping[str, Any]:
        return self._entries[name]

    def change(self, **fields: Any) -> None:
        self.content |= fields
        self._is_changed = True

    def change_run(self, name: str, **fields: Any) -> None:
        self._entries[name] |= fields
        self._encoded.pop(name, None)
        self._is_changed = True

    def save(self) -> None:
        """Write the changes, if there are any; RecordError if the disk refuses."""
        if not self._is_changed:
            return
        with reported(self._file):
            # One line for each run; only changed ones are encoded again.
            changed = [name for name in self._entries if name not in self._encoded]
            self._encoded |= zip(changed, redacted_json(self._entries[name] for name in changed), strict=True)
            head = redacted_json([{name: value for name, value in self.content.items() if name != "runs"}], indent=2)[0]
            entries = ",\n    ".join(self._encoded[name] for name in self._entries)
            write_text(self._file, f'{head.removesuffix("}").rstrip()},\n  "runs": [\n    {entries}\n  ]\n}}\n')
        self._is_changed = False


def new_content(campaign: Campaign, runs: Sequence[PlannedRun], started: datetime | None = None) -> dict[str, Any]:
    """The manifest before the first run; of tuning runs, which have no plan, without `started`."""
    table, is_final = campaign.table, started is not None
    started = started or datetime.now(UTC)
    content: dict[str, Any] = {
        "timestamp": started.isoformat(timespec="seconds"),
        "campaign_toml": campaign.config.source,
        "sha256": hash_of(campaign.content()),
        "conditions": campaign.labels,
        "seeds": table.seeds,
        "max_steps": campaign.max_steps,
        "num_runs": campaign.num_runs,
        "tables": sorted(campaign.file_tables),
        "retrain": __version__,
    }
    if is_final and (plan := sealed_plan(campaign, written=started.isoformat())):
        content["plan"] = plan
    return content | {"runs": [_entry(run) for run in runs]}


def _entry(run: PlannedRun) -> dict[str, Any]:
    condition = run.condition.condition
    return {
        "condition": condition.label,
        "advantage_mode": run.condition.config.algorithm.advantage_mode,
        "transform_mode": run.condition.config.algorithm.transform_mode,
        "overrides": hide(dict(condition.overrides)),
        "control": str(condition.control) if condition.control else None,
        "seed": run.seed,
        "run_name": run.name,
        "log_dir": str(run.folder),
        "config_path": str(run.config_file),
        "max_steps": run.max_steps,
        "status": State.QUEUED,
        "attempts": 0,
        "pid": None,
        "started": None,
        "ended": None,
        "returncode": None,
    }


GOES_ON = "note: not in the ledger: {}. The campaign continues; `retrain compare` will report the gap"


class CampaignRecord:
    """Appends the events of one session to the ledger; `continues`: an earlier session began the campaign.

    A ledger that cannot be written stops nothing: it is reported once, and the campaign continues.
    """

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
        self._append("attempt_started", run=run, attempt=number, continues=continues)

    def tuned(self, record: Mapping[str, Any]) -> None:
        """Every configuration that was tried, and the chosen ones."""
        self._append("tuned", tuning=dict(record))

    def ended(self, state: str, *, done: int, failed: int) -> None:
        self._append("campaign_ended", state=state, done=done, failed=failed)

    def _append(self, kind: str, **fields: Any) -> None:
        folder = ledger_folder(self._path)
        reason = append(folder, kind, campaign=name_in(folder, self._path), **fields)
        if reason and not self._is_refused:
            self._is_refused = True
            self._lines.say(GOES_ON.format(reason), logging.WARNING)
