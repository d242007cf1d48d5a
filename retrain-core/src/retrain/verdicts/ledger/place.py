"""The folder whose ledger covers a run or a campaign, and the hashes by which it knows records."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from retrain.kernel.config.toml_file import open_regular
from retrain.records.files import seal_of
from retrain.records.reading import table_of
from retrain.records.record_names import CAMPAIGN_FILE, EVALUATION, METRICS
from retrain.records.run import settings_key

RUNS = "runs"
HASHED = (METRICS, EVALUATION)  # the final records of a run; eval.jsonl is only there if it was evaluated
OF_THE_PLACE = frozenset({"logging", "resume"})  # tables that say where a run writes, not what it is
NOT_LEARNED = frozenset({"eval", "gaming", "scoring", "watchdog"})  # tables that measure or guard a run


def ledger_folder(path: Path) -> Path:
    """Return the folder whose ledger covers a run or a campaign: the one that holds it.

    A run in `CAMPAIGN/runs/` belongs to the ledger of its campaign, in the folder that holds the campaign.
    """
    folder = path.resolve()
    is_of_campaign = folder.parent.name == RUNS and (folder.parent.parent / CAMPAIGN_FILE).is_file()
    return folder.parent.parent.parent if is_of_campaign else folder.parent


def name_in(folder: Path, path: Path) -> str:
    """Return a run's or campaign's folder relative to that of the ledger, with slashes on every system."""
    full, base = path.resolve(), folder.resolve()
    return full.relative_to(base).as_posix() if full.is_relative_to(base) else str(full)


def record_hashes(run: Path) -> dict[str, str]:
    """Hash a run's final records; a file that is missing, or cannot be read, has no hash."""
    found = {}
    for name in HASHED:
        with suppress(OSError), open_regular(run / name) as stream:
            found[name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def manifest_hashes(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Hash the settings in `run.json`, and its code, data and plugins."""
    from retrain.records.identity.copies import input_digests  # `status` needs none of it

    settings = {name: keys for name, keys in table_of(manifest, "config").items() if name not in OF_THE_PLACE}
    hashes = {"settings": seal_of({"settings": settings})}
    if isinstance(identity := manifest.get("identity"), dict):
        hashes["inputs"] = seal_of({"inputs": input_digests(identity)})
    return hashes


def learned_by(manifest: Mapping[str, Any]) -> str:
    """Hash the settings in `run.json` that decide what a run learns, without its seed and its length."""
    settings = [each for each in settings_key(manifest) if each[0].partition(".")[0] not in NOT_LEARNED]
    return seal_of({"learns": settings})
