"""`manifest.json`: the definition of a campaign and the state of each run, rewritten whenever something changes.

The entry of a run is encoded when it changes: of thousands of runs, few change between two writings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from retrain.campaign.load import Campaign, sealed_plan
from retrain.campaign.outcome import State
from retrain.campaign.planned import PlannedRun
from retrain.kernel.version import __version__
from retrain.records.files import hash_of, reported, write_text
from retrain.records.record_names import CAMPAIGN_FILE
from retrain.text.secrets import hide, redacted_json


class Manifest:
    """The manifest of a running campaign. `save` writes all changes since the last one at once."""

    def __init__(self, folder: Path, content: dict[str, Any]) -> None:
        self._file = folder / CAMPAIGN_FILE
        self.content = content
        self._entries: dict[str, dict[str, Any]] = {entry["run_name"]: entry for entry in content["runs"]}
        self._encoded: dict[str, str] = {}  # entries as text; changed ones are missing
        self._is_changed = True

    def run(self, name: str) -> Mapping[str, Any]:
        """The entry of a run."""
        return self._entries[name]

    def change(self, **fields: Any) -> None:
        """Set fields of the campaign."""
        self.content |= fields
        self._is_changed = True

    def change_run(self, name: str, **fields: Any) -> None:
        """Set fields of a run."""
        self._entries[name] |= fields
        self._encoded.pop(name, None)
        self._is_changed = True

    def save(self) -> None:
        """Write the changes, if there are any; RecordError if the disk refuses."""
        if not self._is_changed:
            return
        with reported(self._file):
            write_text(self._file, self._text())
        self._is_changed = False

    def _text(self) -> str:
        """The content as JSON, with a line for each run."""
        changed = [name for name in self._entries if name not in self._encoded]
        self._encoded |= zip(changed, redacted_json(self._entries[name] for name in changed), strict=True)
        head = redacted_json([{name: value for name, value in self.content.items() if name != "runs"}], indent=2)[0]
        entries = ",\n    ".join(self._encoded[name] for name in self._entries)
        return f'{head.removesuffix("}").rstrip()},\n  "runs": [\n    {entries}\n  ]\n}}\n'


def new_content(campaign: Campaign, runs: Sequence[PlannedRun], started: datetime) -> dict[str, Any]:
    """The manifest of a campaign that has not started."""
    table = campaign.table
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
    if plan := sealed_plan(campaign, written=started.isoformat()):
        content["plan"] = plan
    return content | {"runs": [_entry(run) for run in runs]}


def now() -> str:
    """The current time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


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
