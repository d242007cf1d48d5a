"""Installations of our wheels that a test may damage: ours come from a folder of its own, all else from outside."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = (
    *("retrain-core", "retrain-sepa", "retrain-rewards"),
    *("retrain-local", "retrain-tinker", "retrain-prime-rl"),
)
OURS = ("retrain", "_editable", "__editable__")
COMMAND = "from retrain.rooms.cli.main import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """Our distributions unpacked in `ours`; what they need is in `others`, where nothing of ours is visible."""

    ours: Path
    others: Path

    def python(self, *arguments: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run Python in `folder`. `-S` keeps the outer site-packages, and what is installed editable there, out."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RETRAIN_", "PYTHON"))}
        path = os.pathsep.join([str(self.ours), str(self.others)])
        return subprocess.run(
            [sys.executable, "-S", *arguments],
            cwd=folder,
            env={**inherited, "PYTHONPATH": path, **environ},
            capture_output=True,
            text=True,
            timeout=240,
        )

    def retrain(self, *arguments: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run the `retrain` command as its script would."""
        return self.python("-c", COMMAND, *arguments, folder=folder, **environ)

    def uninstall(self, distribution: str) -> None:
        """Remove the package and the metadata of one distribution."""
        package = distribution.replace("-", "_")
        for entry in [self.ours / package, *self.ours.glob(f"{package}-*.dist-info")]:
            shutil.rmtree(entry)

    def add(self, distribution: str, module: str, source: str) -> None:
        """Install a stranger's distribution of one module, which is its plugin."""
        (self.ours / f"{module}.py").write_text(source, encoding="utf-8")
        metadata = self.ours / f"{distribution.replace('-', '_')}-1.2.dist-info"
        metadata.mkdir()
        metadata.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        metadata.joinpath("entry_points.txt").write_text(f"[retrain]\n{module} = {module}\n")


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A freshly built wheel of each of our distributions."""
    built = {}
    for name in DISTRIBUTIONS:
        folder = tmp_path_factory.mktemp(name)
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(command, cwd=ROOT / name, check=True, capture_output=True, text=True)
        (built[name],) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to all that is installed around this test run, except ours."""
    folder = tmp_path_factory.mktemp("others")
    for packages in map(Path, site.getsitepackages()):
        for entry in packages.iterdir() if packages.is_dir() else ():
            link = folder / entry.name
            if not entry.name.startswith(OURS) and entry.suffix != ".pth" and not link.exists():
                link.symlink_to(entry)
    return folder


@pytest.fixture
def installation(wheels: dict[str, Path], others: Path, tmp_path: Path) -> Installation:
    """All four distributions, installed for one test."""
    ours = tmp_path / "site"
    for wheel in wheels.values():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(ours)
    return Installation(ours=ours, others=others)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """An empty folder to run commands in."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def toml(work: Path) -> Callable[[str], str]:
    """Writes `retrain.toml` into the working folder and returns its name."""

    def write(text: str) -> str:
        work.joinpath("retrain.toml").write_text(text, encoding="utf-8")
        return "retrain.toml"

    return write
