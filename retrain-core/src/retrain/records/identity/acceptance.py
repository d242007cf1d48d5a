"""What a run was continued with although it had changed: recorded in `run.json`, and told from then on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

KEY, VARIABLE = "resumes", "environment variable"


def recorded_resume(
    manifest: Mapping[str, Any], *, step: int, time: str, accepted: Sequence[str], noticed: Sequence[str]
) -> list[Mapping[str, Any]]:
    """The resumes of a run with this one: its step, and the changes that were accepted or only noticed."""
    entry: dict[str, Any] = {"step": step, "time": time, "accepted": list(accepted), "noticed": list(noticed)}
    return [*resumes(manifest), entry]


def resumes(manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Every recorded resume of a run, oldest first; none in a manifest from before they were recorded."""
    found = manifest.get(KEY)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def accepted_changes(manifest: Mapping[str, Any]) -> list[str]:
    """One line per change that `--resume-anyway` accepted: `resumed at step 12 although reward.py:3 changed ...`.

    A changed environment variable stops no run from resuming, and counts as accepted.
    """
    told = []
    for entry in resumes(manifest):
        accepted, noticed = (each if isinstance(each, list) else [] for each in map(entry.get, ("accepted", "noticed")))
        accepted = [*accepted, *(each for each in noticed if str(each).startswith(VARIABLE))]
        told += [f"resumed at step {entry.get('step')} although {change}" for change in accepted]
    return told
