"""A virtual environment that holds what the documentation says to install, and folders in which its lines run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from tests.docs.command_plan import GIVEN, SHORT, SHOWN
from tests.docs.reading import ROOT, blocks, name_of, typed_lines

OURS = ("retrain-core", "retrain-sepa", "retrain-rewards", "retrain-local", "retrain-tinker", "retrain-prime-rl")
# What a clone has of all that a line may name.
CLONED = (*OURS, "templates", "docs", "benchmarks", "README.md", "CONTRIBUTING.md", "LICENSE", "constraints.txt")
NAMES_THE_CLONE = ("constraints.txt", "./retrain-", "docs/pages/", ".venv", "dist ")
PRIVATE = ("RETRAIN", "PYTHON", "WANDB", "HF_", "TINKER", "VIRTUAL_ENV", "CONDA", "TRANSFORMERS_")
LINE_TIMEOUT_S = 600
TINY = ("retrain.toml", "my.toml", "path/to/config.toml")
RUNS = ("logs/tiny", "logs/train", "logs/first", "logs/faster")
SEEDED = ("logs/a_s1", "logs/a_s2", "logs/b_s1", "logs/b_s2")
CAMPAIGN = "logs/campaign_20260301_120000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A virtual environment in `folder`, a copy of the repository in `clone`, and the files that pages presume."""

    folder: Path
    clone: Path
    stage: Path
    typed: set[str] = field(default_factory=set)  # the lines that made it what it is

    def type(self, line: str, *, at: Path, is_short: bool = True) -> subprocess.CompletedProcess[str]:
        """Type one line into bash, in `at`, or in the clone if the line names its files."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(PRIVATE)}
        environ = {
            **inherited,
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "VIRTUAL_ENV": str(self.folder),
            "PIP_FIND_LINKS": f"{self.clone / 'dist'} {os.environ.get('PIP_FIND_LINKS', '')}".strip(),  # the index
            "PIP_CONSTRAINT": str(self.clone / "constraints.txt"),
            "PIP_NO_COMPILE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **(SHORT if is_short else {}),
        }
        if "~/" in line:
            environ["HOME"] = str(at)
            (at / ".config/fish/completions").mkdir(parents=True, exist_ok=True)
        return subprocess.run(
            ["bash", "-c", line],
            cwd=self.clone if any(name in line for name in NAMES_THE_CLONE) else at,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LINE_TIMEOUT_S,
        )

    def must(self, line: str, *, at: Path | None = None) -> str:
        """Type a line that has to succeed; what it prints."""
        done = self.type(line, at=at or self.clone)
        assert done.returncode == 0, f"{line}\n{done.stdout[-4000:]}"
        return done.stdout

    def distributions(self) -> set[str]:
        lines = self.must("pip list --format freeze").splitlines()
        return {name for name in (line.partition("==")[0] for line in lines) if name in OURS}

    def folder_for(self, page: Path, lines: list[str], folder: Path) -> Path:
        """A new folder with what the lines of a page presume: configurations, finished runs, files the page shows."""
        folder.mkdir(parents=True)
        text = "\n".join(lines)
        of_data = any(line.startswith("retrain init --model") and " -o " not in line for line in lines)
        writes_its_own = of_data or "retrain init --template" in text
        for name in TINY:
            if name in text or (name == "retrain.toml" and not writes_its_own):
                _copy(self.stage / "retrain.toml", folder / name)
        for name in RUNS:
            if name in text and not (writes_its_own and name == "logs/tiny"):
                _copy(self.stage / "logs/tiny", folder / name)
        runs = sorted(path.parent for path in self.stage.glob(f"{CAMPAIGN}/**/metrics.jsonl"))
        for name, run in zip(SEEDED, runs, strict=True):
            if name in text:
                _copy(run, folder / name)
        if "campaign" in text:
            _copy(self.stage / CAMPAIGN, folder / CAMPAIGN)
            if "init --template campaign-tiny" not in text:
                _copy(self.stage / "campaign.toml", folder / "campaign.toml")
        _write_what_the_page_shows(page, folder)
        return folder


def make_environment(folder: Path) -> Installed:
    """A virtual environment with pip alone, made as the README says, and a copy of the repository beside it."""
    (line,) = [line for line in typed_lines(ROOT / "README.md") if "-m venv .venv" in line]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # python3 is this one
    subprocess.run(["bash", "-c", line], cwd=folder, env=os.environ | {"PATH": path}, check=True)
    installed = Installed(folder=folder / ".venv", clone=folder / "clone", stage=folder / "stage", typed={line})
    no_outputs = shutil.ignore_patterns("__pycache__", "build", "dist", "*.egg-info")
    for name in CLONED:
        source, target = ROOT / name, installed.clone / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=no_outputs, symlinks=True)
        else:
            shutil.copy2(source, target)
    return installed


def lend_requirements(installed: Installed) -> None:
    """Link the requirements of our distributions into it, from this environment: pip then has nothing to fetch."""
    here = Path(str(metadata.distribution("pytest").locate_file("")))
    (there,) = installed.folder.glob("lib/python*/site-packages")
    wanted, seen = ["retrain-local"], {"retrain-local"}
    while wanted:
        distribution = metadata.distribution(wanted.pop())
        for need in map(Requirement, distribution.requires or ()):
            if need.name not in seen and (need.marker is None or need.marker.evaluate({"extra": ""})):
                seen.add(need.name)
                wanted.append(need.name)
        if distribution.name not in OURS:
            for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
                if (here / name).is_dir():
                    shutil.copytree(here / name, there / name, copy_function=_link, dirs_exist_ok=True)
                else:
                    _link(here / name, there / name)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError:  # two distributions have files in one package
        pass
    except OSError:  # another file system
        shutil.copy2(source, target)


def make_stage(installed: Installed) -> None:
    """Run once, shortened, what the pages presume to have been run."""
    installed.stage.mkdir()
    installed.must("retrain init --template tiny", at=installed.stage)
    installed.must("retrain --max-steps 21", at=installed.stage)  # a page shows the credit of step 20
    installed.must("retrain init --template campaign-tiny && retrain campaign.toml", at=installed.stage)
    (made,) = installed.stage.glob("logs/campaign_*")
    made.rename(installed.stage / CAMPAIGN)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy2(source, target)


def _write_what_the_page_shows(page: Path, folder: Path) -> None:
    """The files that the lines of a page name: from the page's own blocks where it has them."""
    for name, (language, start) in SHOWN.get(name_of(page), {}).items():
        (block,) = (text for text in blocks(page, language) if text.startswith(start))
        (folder / name).write_text(block.partition("\n# or\n")[0], encoding="utf-8")
    for name, content in GIVEN.get(name_of(page), {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
