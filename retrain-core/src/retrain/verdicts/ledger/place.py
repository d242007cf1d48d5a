"""Where the ledger of a run or campaign lies, and the hashes by which it knows records."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from retrain.kernel.config.toml_file import open_regular
from retrain.records.files import seal_of
from retrain.records.reading import table_of
from retrain.records.record_names import CAMPAIGN_FILE, EVALUATION, METRICS, RUN_FILE
from retrain.records.run import settings_key
from retrain.verdicts.ledger.chain import NAME

RUNS = "runs"
LEVELS_ABOVE = 3
HASHED = (METRICS, EVALUATION)  # the final records of a run; eval.jsonl is only there if it was evaluated
EMPTY = hashlib.sha256().hexdigest()  # of a file without a byte, which runs that failed early share
OF_THE_PLACE = frozenset({"logging", "resume"})  # tables that say where a run writes, not what it is
NOT_LEARNED = frozenset({"eval", "gaming", "scoring", "watchdog"})  # tables that measure or guard a run


def ledger_folder(path: Path) -> Path:
    """The folder whose ledger covers a run or a campaign: the one that holds it.

    A run in `CAMPAIGN/runs/` belongs to the ledger of its campaign, in the folder that holds the campaign.
    """
    folder = path.resolve()
    is_of_campaign = folder.parent.name == RUNS and (folder.parent.parent / CAMPAIGN_FILE).is_file()
    return folder.parent.parent.parent if is_of_campaign else folder.parent


def ledgers_above(folder: Path) -> list[Path]:
    """Folders further up that have a ledger: what lies in `folder` may have been moved down from there."""
    return [each for each in folder.parents[:LEVELS_ABOVE] if (each / NAME).is_file()]


def name_in(folder: Path, path: Path) -> str:
    """A run's or campaign's folder relative to that of the ledger, with slashes on every system."""
    full, base = path.resolve(), folder.resolve()
    return full.relative_to(base).as_posix() if full.is_relative_to(base) else str(full)


def folders_below(folder: Path) -> Iterator[Path]:
    """The runs that the ledger in `folder` covers: `RUN` and `CAMPAIGN/runs/RUN`."""
    for pattern in (f"*/{RUN_FILE}", f"*/{RUNS}/*/{RUN_FILE}"):
        yield from (file.parent for file in sorted(folder.glob(pattern)))


def record_hashes(run: Path) -> dict[str, str]:
    """Hashes of a run's final records; a file that is missing, or cannot be read, has none."""
    found = {}
    for name in HASHED:
        with suppress(OSError), open_regular(run / name) as stream:
            found[name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def manifest_hashes(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Hashes of what `run.json` says about a run's settings, and about its code, data and plugins."""
    from retrain.records.identity.copies import input_digests  # `status` needs none of it

    identity = manifest.get("identity")
    settings = {name: keys for name, keys in table_of(manifest, "config").items() if name not in OF_THE_PLACE}
    hashes = {"settings": seal_of({"settings": settings})}
    if isinstance(identity, dict):
        hashes["inputs"] = seal_of({"inputs": input_digests(identity)})
    return hashes


def learned_by(manifest: Mapping[str, Any]) -> str:
    """Hash of the settings in `run.json` that decide what a run learns, apart from its seed and its length."""
    settings = [each for each in settings_key(manifest) if each[0].partition(".")[0] not in NOT_LEARNED]
    return seal_of({"learns": settings})


def cells_of(manifest: Mapping[str, Any]) -> str:
    """Hash of the runs that a campaign's manifest lists, in order: condition, seed and folder of each."""
    runs = manifest.get("runs")
    entries = [each for each in runs if isinstance(each, dict)] if isinstance(runs, list) else []
    return seal_of({"cells": [[each.get(name) for name in ("condition", "seed", "run_name")] for each in entries]})


def question_of(plan: Mapping[str, Any]) -> str:
    """Hash of what a plan asks: hypothesis, metric, baseline and conditions; plans with other seeds ask the same."""
    return seal_of({name: plan.get(name) for name in ("hypothesis", "primary_metric", "baseline", "conditions")})
