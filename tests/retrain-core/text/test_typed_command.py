"""The commands that are printed for the user to type: they run as they are, from where the user is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from retrain.text.amounts import ABSENT, duration
from retrain.text.terminal_text import program


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """An environment in `my folder/.venv` of the current folder, not activated."""
    folder = tmp_path / "my folder/.venv/bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    (folder / "retrain").write_text("#!/bin/sh\necho ours\n")
    (folder / "retrain").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return folder


def types(line):
    """What a line prints that is typed into a shell without any environment."""
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


@pytest.mark.parametrize("folder", [".", "my folder", "elsewhere"])
def test_an_environment_that_is_not_activated_is_named_by_its_path(folder, environment, tmp_path, monkeypatch):
    (tmp_path / folder).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / folder)
    assert types(program()) == "ours"
    assert Path(program().strip("'")).is_absolute() == (folder == "elsewhere")
    assert types(f"{program('python')} -c 'import sys; print(sys.version_info.major)'") == "3"


def test_a_link_to_ours_is_ours_and_another_retrain_is_not(environment, tmp_path, monkeypatch):
    for name in ("linked", "others"):
        (tmp_path / name).mkdir()
    (tmp_path / "linked/retrain").symlink_to(environment / "retrain")
    (tmp_path / "others/retrain").write_text("#!/bin/sh\necho theirs\n")
    (tmp_path / "others/retrain").chmod(0o755)
    monkeypatch.setenv("PATH", f"{environment}{os.pathsep}/usr/bin:/bin")  # it is activated
    assert [program(name) for name in ("retrain", "python")] == ["retrain", "python"]
    monkeypatch.setenv("PATH", f"{tmp_path / 'linked'}:/usr/bin:/bin")
    assert program() == "retrain"
    monkeypatch.setenv("PATH", f"{tmp_path / 'others'}:/usr/bin:/bin")
    assert types(program()) == "ours"


DURATIONS = {0.0: "0 ms", 0.000012: "0.012 ms", 0.0003: "0.3 ms", 0.25: "250 ms", 0.421: "420 ms", 1.0: "1.0 s"}
DURATIONS |= {
    12.4: "12 s",
    59.4: "59 s",
    59.6: "0:01:00",
    75.3: "0:01:15",
    3723: "1:02:03",
    300_000: "3 days, 11:20:00",
}


def test_a_duration_reads_at_a_glance():
    assert {seconds: duration(seconds) for seconds in DURATIONS} == DURATIONS
    assert [duration(seconds) for seconds in (None, float("nan"), float("inf"))] == [ABSENT] * 3
