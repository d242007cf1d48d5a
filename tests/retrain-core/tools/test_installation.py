"""The public package `retrain` has our import name: what is said, and by what is left, in each order of installing."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import retrain
from retrain.tools.doctor import checks
from retrain.tools.doctor.checks import diagnose_machine
from retrain.tools.installation import Installation, examine

SOURCE = Path(retrain.__file__).parent
PUBLIC = {  # the files of 0.3.0 that matter here
    "retrain/__init__.py": "from retrain.advantages import Theirs\n",
    "retrain/advantages.py": "Theirs = object()\n",
    "retrain/cli.py": "def main():\n    print('another program')\n",
}
START = "from retrain.cli import main; main()"  # what the script of either package does


def record(folder: Path, name: str, version: str, files: Iterable[str]) -> None:
    """A `dist-info` with the hashes of the files as they are now."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    hashes = {file: hashlib.sha256((folder / file).read_bytes()).digest() for file in files}
    rows = [f"{file},sha256={base64.urlsafe_b64encode(hashes[file]).decode().rstrip('=')},1\n" for file in hashes]
    (info / "RECORD").write_text("".join([*rows, f"{info.name}/RECORD,,\n"]))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """retrain-core as pip installs it."""
    shutil.copytree(SOURCE, tmp_path / "retrain", ignore=shutil.ignore_patterns("__pycache__"))
    files = [str(file.relative_to(tmp_path)) for file in (tmp_path / "retrain").rglob("*") if file.is_file()]
    record(tmp_path, "retrain-core", "0.1.0", files)
    return tmp_path


def add_public(site: Path) -> None:
    """Install the public package over it."""
    for file, text in PUBLIC.items():
        (site / file).write_text(text)
    record(site, "retrain", "0.3.0", PUBLIC)


def started(site: Path) -> subprocess.CompletedProcess[str]:
    """What a person sees who types `retrain doctor`, with nothing on the path but these files and Python's own."""
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site)}
    return subprocess.run([sys.executable, "-S", "-c", START], env=environ, capture_output=True, text=True, check=False)


def test_files_as_they_were_installed_are_whole(site: Path) -> None:
    found = examine([str(site)])
    assert found.is_whole
    assert found.num_files > 300
    assert (found.fix, found.detail) == ("", f"{found.num_files} files of retrain-core, unchanged")


def test_the_public_package_over_ours_is_told_by_whichever_script_is_left(site: Path) -> None:
    add_public(site)
    found = examine([str(site)])
    assert (found.public, found.replaced, found.missing) == (
        "0.3.0",
        ("retrain/__init__.py", "retrain/advantages.py"),
        (),
    )
    done = started(site)
    assert done.returncode == 1
    assert "another program\n" not in done.stdout
    assert "the public package `retrain` 0.3.0, another program of the same import name" in done.stderr
    assert "retrain/__init__.py, retrain/advantages.py of retrain-core replaced" in done.stderr
    assert "fix: pip uninstall --yes retrain && pip install --force-reinstall --no-deps retrain-core" in done.stderr


def test_uninstalling_the_public_package_leaves_gaps_that_are_told(site: Path) -> None:
    add_public(site)
    for file in PUBLIC:
        (site / file).unlink()
    shutil.rmtree(site / "retrain-0.3.0.dist-info")
    done = started(site)
    assert done.returncode == 1
    assert "retrain/__init__.py, retrain/advantages.py missing" in done.stderr
    assert "fix: pip install --force-reinstall --no-deps retrain-core" in done.stderr


def test_ours_over_the_public_package_runs_and_the_doctor_warns_of_the_day_it_is_uninstalled(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "retrain-0.3.0.dist-info").mkdir()
    (site / "retrain-0.3.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: retrain\nVersion: 0.3.0\n")
    found = examine([str(site)])
    assert found.detail.endswith("is installed too: uninstalling it will remove files of retrain-core")
    monkeypatch.setattr(checks, "examine", lambda: found)
    (told,) = [each for each in diagnose_machine(None) if each.name == "installation"]
    assert told.is_fatal
    assert told.fix.startswith("pip uninstall --yes retrain && ")


def test_a_file_changed_by_hand_is_a_warning_and_an_editable_installation_is_whole(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (site / "retrain/api.py").open("a") as stream:
        stream.write("# mine\n")
    found = examine([str(site)])
    assert found.replaced == ("retrain/api.py",)
    monkeypatch.setattr(checks, "examine", lambda: found)
    assert [each.status for each in diagnose_machine(None) if each.name == "installation"] == ["warn"]
    (site / "retrain_core-0.1.0.dist-info/RECORD").write_text("retrain_core-0.1.0.dist-info/RECORD,,\n")
    assert examine([str(site)]) == Installation(num_files=0)
