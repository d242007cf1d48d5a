"""The preflight through the command line: PASS and FAIL, and what is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retrain.cli.command_line import run


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("transform", ["none", "gtpo", "gtpo_hicra", "gtpo_sepa"])
@pytest.mark.parametrize("uncertainty", ["surprisal", "predictive_variance", "shannon_entropy"])
def test_every_built_in_flow_passes(transform: str, uncertainty: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "--json", "--transform-mode", transform, "--uncertainty-kind", uncertainty]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["ok"] is True
    assert content["probe_cases_passed"] == content["probe_cases_run"] == 2
    assert content["flow"]["condition_label"] == f"maxrl+{transform}"
    assert content["flow"]["needs_planning"] is (transform in ("gtpo_hicra", "gtpo_sepa"))
    assert content["flow"]["uses_sepa_controller"] is (transform == "gtpo_sepa")
    assert ("entropies of the sampling distribution" in content["flow"]["needs"]) is (uncertainty == "shannon_entropy")
    means = {(row["group"], row["reward"]): row["credit_mean"] for row in content["example"]}
    if transform != "gtpo_hicra":  # its planning tokens drift upwards, the others keep the episode advantage
        assert means[(1, 1.0)] == pytest.approx(3.0, abs=1e-4)


def test_a_plugin_that_breaks_its_contract_fails_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short_advantage.py").write_text("def one(rewards):\n    return rewards[:1]\n")
    assert run(["trace", "--advantage-mode", "short_advantage.one"]) == 1
    out = capsys.readouterr().out
    assert "[ERROR] [probe]" in out
    assert "short_advantage.one" in out
    assert "has length 1, expected 4" in out
    assert out.endswith("FAIL\n")


def test_config_problems_are_shown_not_raised(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "--json", "--advantage-mode", "gpro", "--lr", "-1"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["ok"] is False
    messages = " ".join(issue["message"] for issue in content["issues"])
    assert "did you mean 'grpo'" in messages
    assert "lr" in messages


def test_a_group_of_one_fails_where_the_advantage_needs_a_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["trace", "--group-size", "1"]) == 1
    assert "[ERROR] [config] --group-size [training] group_size: advantage 'maxrl'" in capsys.readouterr().out
    (tmp_path / "alone.py").write_text("def raw(rewards):\n    return rewards\n")
    assert run(["trace", "--group-size", "1", "--advantage-mode", "alone.raw"]) == 0
    assert "[WARN] [config] group_size = 1" in capsys.readouterr().out
    assert run(["trace", "--group-size", "1", "--advantage-mode", "reinforce_pp"]) == 0
    assert "group_size" not in capsys.readouterr().out  # over the step, a completion has others to be compared with
