"""A campaign of the tiny model that looks as planned and stops by itself, killed on the way."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.campaigns import check_same, kill_all, manifest, wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]

CONDITION = '[[campaign.conditions]]\nadvantage_mode = "{}"\ntransform_mode = "{}"\n{}\n'
PLANNED = """
[campaign]
seeds = {seeds}
max_steps = 12
parallel = true
max_workers = 2
{conditions}
[campaign.plan]
hypothesis = "a rate ten times as high learns more"
looks = {looks}
[model]
model = "builtin:tiny"
[backend]
devices = "cpu"
[training]
batch_size = 8
group_size = 8
max_tokens = 24
lr = 3e-3
[data]
source = "arithmetic"
[reward]
type = "match"
[scoring]
workers = 1
[eval]
every = 12
examples = 32
samples = 2
seed = 0
"""
OF_THE_TIME = ("time", "previous", "sha256", "data", "look")  # `data` hashes records, which hold times


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "retrain", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(*arguments: str) -> str:
    out, _ = (process := start(*arguments)).communicate(timeout=1400)
    assert process.returncode == 0, out
    return out


def compared(folder: str) -> dict[str, Any]:
    """What `compare --json` says, without the folder's name, the time of the plan and what seconds cost."""
    text = run("compare", f"{folder}/out", "--json").replace(f"{folder}/out", "out")
    content: dict[str, Any] = json.loads(text)
    del content["plan"]["written"], content["plan"]["sha256"]
    for comparison in content["comparisons"]:
        (comparison.get("examples") or {}).pop("advice", None)
    return content


def looks_on_record(folder: str) -> list[dict[str, Any]]:
    """Looks and verdicts in the ledger, without times and what follows from them."""
    lines = map(json.loads, Path(folder, "ledger.jsonl").read_text(encoding="utf-8").splitlines())
    seen = [line for line in lines if line["kind"] in ("look", "verdict")]
    return [{name: value for name, value in line.items() if name not in OF_THE_TIME} for line in seen]


def num_done(folder: str) -> int:
    try:
        return sum(entry["status"] == "done" for entry in manifest(f"{folder}/out")["runs"])
    except (OSError, ValueError):
        return 0


def planned(folder: str, first: str = "", second: str = "", **values: object) -> tuple[str, ...]:
    """Write a campaign of two conditions with these keys; its command line, into a folder with a separate ledger."""
    conditions = CONDITION.format("grpo", "none", first) + CONDITION.format("grpo", "none", second)
    if values:
        Path("c.toml").write_text(PLANNED.format(conditions=conditions, **values), encoding="utf-8")
    Path(folder).mkdir(exist_ok=True)
    return "c.toml", "--log-dir", f"{folder}/out"


def kill(*arguments: str, until: Callable[[], bool], wait_s: float) -> None:
    """Start it, and SIGKILL it with all its runs once `until` holds and a moment has passed."""
    process = start(*arguments)
    wait_for(until, process)
    time.sleep(wait_s)
    assert process.poll() is None, "it ended before it was killed"
    kill_all(process)


def test_it_stops_by_itself_and_a_killed_one_ends_the_same() -> None:
    """Twice killed, at a random instant and while it looks, it has the records and the verdict of one left alone."""
    out = run(*planned("alone", "lr = 3e-4", "lr = 3e-3", seeds=[1, 2, 3, 4, 5, 6, 7, 8], looks=[6, 8]))
    assert "look after 6 seeds" in out
    assert "12 of 12 runs done, 0 failed; the planned looks saved 4 of 16" in out
    killed = planned("killed")
    kill(*killed, until=lambda: num_done("killed") >= random.Random(20).randrange(1, 6), wait_s=3.7)
    assert "looks" not in manifest("killed/out")
    kill(*killed, until=lambda: num_done("killed") == 12, wait_s=0.1)
    run(*killed)
    check_same("killed/out", "alone/out")
    assert manifest("killed/out")["looks"] == manifest("alone/out")["looks"]
    assert looks_on_record("killed") == looks_on_record("alone")
    wanted = compared("alone")
    assert compared("killed") == wanted
    (comparison,) = wanted["comparisons"]
    assert (comparison["verdict"], comparison["looks"]["design"]) == ("better", "planned looks")
    assert (comparison["looks"]["taken"], comparison["looks"]["decided_after"]) == ([6], 6)
    assert (len(comparison["seeds"]), wanted["standing"], wanted["left_out"]) == (6, "planned", [])
    assert "Already complete: all 12 runs are done" in run(*killed)
