"""The conformance checks for recorders, and tests of this one's file."""

from __future__ import annotations

{% if cookiecutter.form == "file" %}
import sys
{% endif %}
from pathlib import Path

import pytest
from retrain.testing import Check, conformance

{% if cookiecutter.form == "file" %}
sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder where `retrain` runs

{% endif %}
from {{ cookiecutter.path }} import LongCsv


@pytest.mark.parametrize("check", conformance("recorder", "{{ cookiecutter.selected }}"), ids=str)
def test_conforms(check: Check) -> None:
    check()


def test_only_numbers_become_lines(tmp_path: Path) -> None:
    recorder = LongCsv()
    recorder.start({}, tmp_path)
    recorder.step({"step": 0, "reward": 0.5, "condition": "a+b", "loss": None, "skipped": True})
    assert (tmp_path / "metrics.csv").read_text().split() == ["step,metric,value", "0,reward,0.5", "0,skipped,1.0"]


def test_a_resume_repeats_no_step(tmp_path: Path) -> None:
    first = LongCsv()
    first.start({}, tmp_path)
    first.step({"step": 0, "reward": 0.25})
    state = first.state()
    first.step({"step": 1, "reward": 0.5})  # after the checkpoint: the resumed run repeats this step
    second = LongCsv()
    second.restore(state)
    second.start({}, tmp_path)
    second.step({"step": 1, "reward": 0.5})
    assert (tmp_path / "metrics.csv").read_text().split() == ["step,metric,value", "0,reward,0.25", "1,reward,0.5"]
