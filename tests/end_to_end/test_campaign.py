"""`retrain campaign.toml` with the model that ships with retrain-local."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.campaigns import check_same, kill_all, manifest, wait_for

SMALL = ("--max-steps", "3", "--batch-size", "4", "--group-size", "4", "--max-tokens", "16", "--save-every", "1")
EVALS = ("--eval-examples", "4", "--eval-samples", "2", "--campaign-seeds", "42", "--keep-last", "0")
TWO = "\n".join(
    f'[[campaign.conditions]]\nadvantage_mode = "{advantage}"\ntransform_mode = "{transform}"\n'
    for advantage, transform in (("grpo", "none"), ("maxrl", "gtpo_sepa"))
)


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """The command in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "retrain", *arguments],
        cwd=cwd,
        env=os.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    process = start(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


def init(folder: Path) -> None:
    """The template with two other conditions and without a plan."""
    assert finish("init", "--template", "campaign-tiny", cwd=folder)[0] == 0
    file = folder / "campaign.toml"
    head, _, rest = file.read_text().partition("[[campaign.conditions]]")
    file.write_text(f"{head}{TWO}\n[model]{rest.partition('[model]')[2]}")


@pytest.mark.long
def test_a_campaign_of_the_tiny_model_and_its_status(tmp_path: Path) -> None:
    init(tmp_path)
    code, out, err = finish("campaign.toml", *SMALL, *EVALS, cwd=tmp_path)
    assert (code, err) == (0, ""), out
    [folder] = (tmp_path / "logs").glob("campaign_*")
    content = manifest(folder)
    assert content["conditions"] == ["grpo+none", "maxrl+gtpo_sepa"]
    assert (content["seeds"], content["max_steps"]) == ([42], 3)
    for run in content["runs"]:
        assert (tmp_path / run["log_dir"] / "adapter/final/adapter_model.safetensors").is_file()
    code, out, err = finish("status", "--json", cwd=tmp_path)
    assert code == 0, err
    [campaign] = json.loads(out)["campaigns"]
    assert (campaign["status"], campaign["completed"], campaign["failed"]) == ("done", 2, 0)
    assert campaign["conditions"] == ["grpo+none", "maxrl+gtpo_sepa"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_killed_as_a_whole_and_rerun_it_is_byte_identical(tmp_path: Path) -> None:
    init(tmp_path)
    whole, killed = ("--log-dir", "whole"), ("--log-dir", "killed")
    assert finish("campaign.toml", *SMALL, *EVALS, *whole, "--campaign-parallel", "false", cwd=tmp_path)[0] == 0
    for name in ("grpo+none_s42", "maxrl+gtpo_sepa_s42"):
        process = start("campaign.toml", *SMALL, *EVALS, *killed, "--campaign-max-workers", "1", cwd=tmp_path)
        metrics = tmp_path / "killed/runs" / name / "metrics.jsonl"
        wait_for(lambda file=metrics: file.exists() and file.read_bytes().count(b"\n") > 1, process)  # type: ignore[misc]
        kill_all(process)
    code, out, err = finish("campaign.toml", *SMALL, *EVALS, *killed, cwd=tmp_path)
    assert code == 0, out + err
    check_same(tmp_path / "killed", tmp_path / "whole")
