"""Campaigns whose processes are killed, and the comparison with the same campaign left alone."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from retrain.records.checkpoints import STATE, SUMS

TUNED = """
[campaign.tune]
"training.lr" = { low = 1e-2, high = 1.0, log = true }
runs = 2
seeds = [7]
"""
# Hold times, processes, or sizes of what holds times.
TIMED = (
    "run.json",
    ".lock",
    "heartbeat.json",
    "stdout.log",
    "stderr.log",
    "slurm.json",
    "trainer_state.json",
    STATE,
    SUMS,
)


def manifest(folder: str | Path = "out") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))
    return content


def contents(folder: Path) -> dict[str, Any]:
    """Everything that a run wrote, apart from time, processes and logs."""
    found: dict[str, Any] = {}
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if not file.is_file() or file.name in TIMED:
            continue
        if name == "metrics.jsonl":
            lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            found[name] = [{k: v for k, v in line.items() if not k.endswith("time_s")} for line in lines]
        elif name == "config.toml":  # names its own folder and throttle
            found[name] = [line for line in file.read_text().splitlines() if "_dir =" not in line]
        else:
            found[name] = file.read_bytes()
    return found


def check_same_search(folder: str | Path, wanted: str | Path) -> None:
    """Both tried and chose the same, in the same tuning runs, and the final runs are the same."""
    assert manifest(folder)["tuning"] == manifest(wanted)["tuning"]
    check_same(Path(folder) / "tuning", Path(wanted) / "tuning")
    check_same(folder, wanted)


def check_same(folder: str | Path, wanted: str | Path) -> None:
    """Every run byte for byte that of the other campaign, apart from time."""
    names = [run["run_name"] for run in manifest(wanted)["runs"]]
    assert names == [run["run_name"] for run in manifest(folder)["runs"]]
    for name in names:
        ours, theirs = contents(Path(folder) / "runs" / name), contents(Path(wanted) / "runs" / name)
        assert set(ours) == set(theirs), name
        for file, content in theirs.items():
            assert ours[file] == content, f"{name}/{file}"


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition() and process.poll() is None:
        time.sleep(0.01)


def kill_all(process: subprocess.Popen[str], *, orphans_too: bool = True) -> None:
    """SIGKILL to the runner, and to every process of its session, which must be its own."""
    members = session_of(process.pid) if orphans_too else []
    process.kill()
    for pid in members:
        with suppress(ProcessLookupError):
            os.kill(pid, 9)
    process.communicate()


def session_of(leader: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if os.getsid(int(entry.name)) == leader:
                    found.append(int(entry.name))
    return found
