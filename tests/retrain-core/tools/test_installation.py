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


def severity(found: Installation, monkeypatch: pytest.MonkeyPatch) -> tuple[str, bool]:
    """Status of the doctor's finding, and whether it is fatal."""
    monkeypatch.setattr(checks, "examine", lambda: found)
    (finding,) = (each for each in diagnose_machine(None) if each.name == "installation")
    return finding.status, finding.is_fatal


def test_the_public_package_over_ours_is_reported_by_whichever_script_is_left(site: Path) -> None:
    found = examine([str(site)])
    assert (found.is_whole, found.num_files > 300, found.fix) == (True, True, "")
    add_public(site)
    found, both = examine([str(site)]), ("retrain/__init__.py", "retrain/advantages.py")
    assert (found.public, found.replaced, found.missing) == ("0.3.0", both, ())
    done = started(site)
    assert (done.returncode, "another program\n" in done.stdout) == (1, False)
    assert ", ".join(both) in done.stderr
    assert "fix: pip uninstall --yes retrain && pip install --force-reinstall --no-deps retrain-core" in done.stderr
    for file in PUBLIC:
        (site / file).unlink()
    shutil.rmtree(site / "retrain-0.3.0.dist-info")
    done = started(site)  # uninstalling it has left gaps
    assert (done.returncode, f"{', '.join(both)} missing" in done.stderr) == (1, True)
    assert "fix: pip install --force-reinstall --no-deps retrain-core" in done.stderr


def test_ours_over_the_public_package_runs_and_the_doctor_warns(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "retrain-0.3.0.dist-info").mkdir()
    (site / "retrain-0.3.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: retrain\nVersion: 0.3.0\n")
    found = examine([str(site)])
    assert (found.replaced, found.fix.startswith("pip uninstall --yes retrain && ")) == ((), True)
    assert severity(found, monkeypatch)[1]


def test_a_file_changed_by_hand_is_a_warning_an_editable_one_whole(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (site / "retrain/api.py").open("a") as stream:
        stream.write("# mine\n")
    found = examine([str(site)])
    assert (found.replaced, severity(found, monkeypatch)[0]) == (("retrain/api.py",), "warn")
    (site / "retrain_core-0.1.0.dist-info/RECORD").write_text("retrain_core-0.1.0.dist-info/RECORD,,\n")
    assert examine([str(site)]) == Installation(num_files=0)
