"""Real wandb, offline, in a process of its own: it reads its settings once per process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.wandb_log import transactions

pytest.importorskip("wandb")
pytestmark = pytest.mark.slow

Make = Callable[..., Path]
Factors = tuple[np.ndarray, np.ndarray]
SECRET = "planted-secret-4711"
EMPTY_LOG_BYTES = 100
PROGRAM = """
import sys
from pathlib import Path
from retrain.squeeze import analyze_adapter
from retrain.tools.squeeze.job import record_analysis

table = {"wandb_project": sys.argv[3], "wandb_group": "mine", "wandb_tags": "first, second"}
print("id:", record_analysis(analyze_adapter(sys.argv[1]), table, Path(sys.argv[2])))
"""


def record(adapter: Path, folder: Path, project: str, **environ: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    command = [sys.executable, "-c", PROGRAM, str(adapter), str(folder), project]
    environ = {**clean, "WANDB_MODE": "offline", **environ}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.rpartition("id:")[2].strip()


def read_run(folder: Path) -> tuple[Any, list[dict[str, Any]], dict[str, Any]]:
    """The run's record, its history and its summary from the one transaction log below `folder`."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = (file for file in folder.glob("wandb/*run-*/run-*.wandb") if file.stat().st_size > EMPTY_LOG_BYTES)
    run: Any = None
    rows, summary = [], {}
    for content in transactions(file.read_bytes()):
        record = Record()
        record.ParseFromString(content)
        kind = record.WhichOneof("record_type")
        run = record.run if kind == "run" else run
        rows += [_values(record.history.item)] if kind == "history" else []
        summary |= _values(record.summary.update) if kind == "summary" else {}
    return run, rows, summary


def _values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_the_run_its_table_and_its_summary(make_adapter: Make, documented_factors: Factors, tmp_path: Path) -> None:
    run_id = record(make_adapter({"q": documented_factors}), tmp_path, "demo", MY_API_KEY=SECRET)
    run, rows, summary = read_run(tmp_path)
    assert (run.run_id, run.display_name, run.project, run.job_type) == (run_id, "squeeze-analysis", "demo", "squeeze")
    assert (run.run_group, list(run.tags)) == ("mine", ["first", "second", "squeeze", "rank-4"])
    steps = [row for row in rows if "squeeze/mean_variance" in row]
    assert [row["squeeze/rank"] for row in steps] == [1, 2, 4]
    for name in ("mean", "min", "max"):
        values = [row[f"squeeze/{name}_variance"] for row in steps]
        assert values == pytest.approx([0.555809, 0.870985, 1.0], abs=5e-7)
    wanted = {"recommended_rank": 4, "source_rank": 4, "min_variance_retention": 0.95, "num_layers": 1}
    assert {name: summary[f"squeeze/{name}"] for name in wanted} == wanted
    (table,) = tmp_path.glob("wandb/*run-*/files/media/table/squeeze/variance_table_*.table.json")
    content = json.loads(table.read_text())
    assert content["columns"] == ["rank", "mean_variance", "min_variance", "max_variance", "recommended"]
    assert [(row[0], row[-1]) for row in content["data"]] == [(1, False), (2, False), (4, True)]
    files = [file for file in (tmp_path / "wandb").rglob("*") if file.is_file()]
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []


@pytest.mark.long
def test_without_a_project_nothing_is_recorded(make_adapter: Make, documented_factors: Factors, tmp_path: Path) -> None:
    assert record(make_adapter({"q": documented_factors}), tmp_path, "") == ""
    assert not (tmp_path / "wandb").exists()


@pytest.mark.long
def test_without_a_key_it_is_kept_offline(make_adapter: Make, documented_factors: Factors, tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    assert record(make_adapter({"q": documented_factors}), tmp_path, "demo", WANDB_MODE="online", **home)
    run, rows, _ = read_run(tmp_path)
    assert run.display_name == "squeeze-analysis"
    assert rows
