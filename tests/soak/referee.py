"""What must be equal is compared byte for byte; and nothing that was once on disk may be lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from retrain.records.checkpoints import newest_valid
from retrain.verdicts.ledger.history import read_chain
from tests.end_to_end import campaigns
from tests.end_to_end.killing import check_nothing_is_half_written

# Counts of what befell servers and scoring processes, and the probe by which a server was let back in.
OF_FAULTS = ("inference_", "probe_gap", "timed_out_score_count")
# What a disturbed run may have beside the other: checkpoints of a stop, and what was set aside or told about a fault.
BESIDE = ("adapter/checkpoint_step_", "adapter/.", "failures", "stacks.txt", "inputs/until_", "emergence/.")


class PromiseError(AssertionError):
    """A promise was broken."""


def require(is_kept: object, what: str) -> None:
    if not is_kept:
        raise PromiseError(what)


def check_same(folder: Path, twin: Path, *, is_campaign: bool, lost: Sequence[str] = ()) -> None:
    """Every file that the undisturbed twin has, as it has it; and nothing else but what faults may leave.

    Files in the places `lost` may be missing: somebody has deleted them.
    """
    if not is_campaign:
        _check_run(folder, twin, tuple(lost))
        return
    names = [str(run["run_name"]) for run in campaigns.manifest(twin)["runs"]]
    require(names == [str(run["run_name"]) for run in campaigns.manifest(folder)["runs"]], "other runs in the campaign")
    for name in names:
        _check_run(folder / "runs" / name, twin / "runs" / name)


def _check_run(run: Path, twin: Path, lost: tuple[str, ...] = ()) -> None:
    ours, theirs = _comparable(run), _comparable(twin)
    missing = [name for name in sorted(set(theirs) - set(ours)) if not name.startswith(lost)]
    require(not missing, f"{run}: {missing} are missing")
    more = [name for name in sorted(set(ours) - set(theirs)) if not name.startswith(BESIDE)]
    require(not more, f"{run}: {more} are of no run that was left alone")
    for name, content in ((name, content) for name, content in theirs.items() if name in ours):
        if ours[name] != content:
            raise PromiseError(f"{run / name} is another one than {twin / name}{_first(ours[name], content)}")


def _comparable(run: Path) -> dict[str, Any]:
    found = campaigns.contents(run)
    del found["inputs/files.json"]  # has the places of the files
    found["metrics.jsonl"] = [
        {key: value for key, value in line.items() if not key.startswith(OF_FAULTS)} for line in found["metrics.jsonl"]
    ]
    found["config.toml"] = [line for line in found["config.toml"] if not line.startswith("url =")]
    return found


def _first(ours: Any, theirs: Any) -> str:
    """Where two lists of lines part."""
    if not isinstance(ours, list):
        return ""
    if len(ours) != len(theirs):
        return f": {len(ours)} lines, not {len(theirs)}"
    number = next(n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    if not isinstance(ours[number], dict):
        return f": {ours[number]!r}, not {theirs[number]!r}"
    keys = [key for key in {**ours[number], **theirs[number]} if ours[number].get(key) != theirs[number].get(key)]
    return f": line {number + 1}, {keys[:8]}, {ours[number].get(keys[0])!r}, not {theirs[number].get(keys[0])!r}"


def check_whole(runs: Iterable[Path]) -> None:
    for run in runs:
        check_nothing_is_half_written(run)


def check_ledger(folder: Path) -> None:
    for entry in read_chain(folder / "ledger.jsonl"):
        require(not entry.fault, f"{folder}/ledger.jsonl:{entry.line} {entry.fault}")


def progress(run: Path) -> int:
    checkpoint, _ = newest_valid(run / "adapter")
    return checkpoint.next_step if checkpoint else 0


def everything(folder: Path) -> dict[str, bytes]:
    """All bytes below a folder, apart from locks and from what a kill has left half-written."""
    names = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
    return {name: file.read_bytes() for name, file in names.items() if file.name != ".lock" and "/." not in name}
