"""Installations of our wheels that a test may damage: ours come from a folder of its own, all else from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from retrain_local.plugin import BUILTIN_MODELS
from tests.kit.mlx_server import float32_copy, mlx_serving
from tests.kit.shared import made_once

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = (
    *("retrain-core", "retrain-sepa", "retrain-rewards"),
    *("retrain-local", "retrain-tinker", "retrain-prime-rl"),
)
OURS = ("retrain", "_editable", "__editable__")
COMMAND = "from retrain.cli.command_line import main; main()"


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
        return self.python("-c", COMMAND, *arguments, folder=folder, **environ)

    def uninstall(self, distribution: str) -> None:
        package = distribution.replace("-", "_")
        for entry in [self.ours / package, *self.ours.glob(f"{package}-*.dist-info")]:
            shutil.rmtree(entry)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    def build(folder: Path) -> None:
        for name in DISTRIBUTIONS:
            command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / name)]
            subprocess.run(command, cwd=ROOT / name, check=True, capture_output=True, text=True)

    built = made_once(tmp_path_factory, "wheels", build)
    return {name: next((built / name).glob("*.whl")) for name in DISTRIBUTIONS}


@pytest.fixture(scope="session")
def unpacked(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them unpacked, with byte code: a process that imports them does not compile them."""

    def unpack(folder: Path) -> None:
        for wheel in wheels.values():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        # not checked: templates of plugins are Python only once they are filled in
        subprocess.run([sys.executable, "-m", "compileall", "-q", str(folder)], check=False, capture_output=True)

    return made_once(tmp_path_factory, "unpacked", unpack)


@pytest.fixture(scope="session")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to all that is installed around this test run, except ours."""

    def link_all(folder: Path) -> None:
        for packages in (Path(each) for each in sys.path if each.endswith("-packages")):
            for entry in packages.iterdir() if packages.is_dir() else ():
                link = folder / entry.name
                if not entry.name.startswith(OURS) and entry.suffix != ".pth" and not link.exists():
                    link.symlink_to(entry)

    return made_once(tmp_path_factory, "others", link_all)


@pytest.fixture
def installation(unpacked: Path, others: Path, tmp_path: Path) -> Installation:
    ours = tmp_path / "site"
    shutil.copytree(unpacked, ours, copy_function=os.link)  # tests take files away or add some; none is written to
    return Installation(ours=ours, others=others)


@pytest.fixture
def work(tmp_path: Path) -> Path:
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


@pytest.fixture(scope="session")
def exact_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model with its weights stored in float32, as MLX then computes."""
    return float32_copy(BUILTIN_MODELS["tiny"], tmp_path_factory.mktemp("models") / "tiny-float32")


@pytest.fixture(scope="session")
def mlx_url(exact_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of MLX-LM whose own defaults of sampling no request may get."""
    home = tmp_path_factory.mktemp("mlx")
    with mlx_serving(exact_model, home, "--temp", "0.1", "--top-k", "1", "--top-p", "0.2", "--min-p", "0.9") as url:
        yield url
