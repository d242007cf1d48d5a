"""The conformance checks for launchers, and a test of this one's priority."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from retrain.api import Job
from retrain.testing import Check, conformance

{% if cookiecutter.form == "file" %}
sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder where `retrain` runs

{% endif %}
from {{ cookiecutter.path }} import PoliteLauncher


@pytest.mark.parametrize("check", conformance("launcher", "{{ cookiecutter.selected }}"), ids=str)
def test_conforms(check: Check) -> None:
    check()


def test_a_run_gives_way(tmp_path: Path) -> None:
    argv = (sys.executable, "-c", "import os; print(os.nice(0))")
    running = PoliteLauncher(nice=5).start(Job(name="run", argv=argv, environ={}, cwd=tmp_path, folder=tmp_path))
    while running.poll() is None:
        time.sleep(0.01)
    assert running.poll() == 0
    assert int((tmp_path / "stdout.log").read_text()) == min(os.nice(0) + 5, 19)
