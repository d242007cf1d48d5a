"""`init-plugin --distribution` for every kind: from the command to a passing `pytest` and `retrain plugins`.

One kind is tried at every change, and all of them, installed by one pip and tested by one pytest, in `nox -s proofs`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from retrain.cli.command_line import run
from retrain.cli.scaffold.render import KINDS, slug, template
from retrain.kernel.registry import HOOK_OF_KIND
from retrain.kernel.types import Kind
from tests.end_to_end.running import SCRIPT
from tests.kit.shared import made_once

SLUGS = [slug(kind) for kind in KINDS]
PIP = ("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--target")


def python(*words: str) -> tuple[str, ...]:
    return (sys.executable, *words)


def typed(folder: Path, *words: str) -> str:
    """Run a command in a folder, with what is installed in its `site`; returns its output."""
    environ = {**os.environ, "PYTHONPATH": str(folder / "site")}
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def check_names(folder: Path, kinds: list[str]) -> None:
    """`retrain plugins` shows the new name of each kind, from its distribution, and no failure."""
    content = json.loads(typed(folder, str(SCRIPT), "plugins", "--json"))
    for kind in kinds:
        rows = {row["name"]: row for row in content["kinds"][kind.replace("-", " ")]}
        assert rows[f"my_{kind.replace('-', '_')}"]["distribution"] == f"my-{kind}"
    assert content["failures"] == []


def test_from_the_command_to_passing_tests_and_the_name_in_the_list(tmp_path: Path) -> None:
    name = ("--name", "my-transform", "--kind", "transform", "--no-input")
    told = typed(tmp_path, str(SCRIPT), "init-plugin", "--distribution", *name)
    assert 'pip install -e "./my-transform[dev]"' in told
    assert "pytest ./my-transform" in told
    typed(tmp_path, *python(*PIP, str(tmp_path / "site"), "./my-transform"))
    typed(tmp_path, *python("-m", "pytest", "-q", "-p", "no:cacheprovider", "my-transform"))
    check_names(tmp_path, ["transform"])


@pytest.fixture(scope="session")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated project of every kind."""

    def make(folder: Path) -> None:
        for kind in SLUGS:
            given = ("--distribution", "--name", f"my-{kind}", "-k", kind, "-o", str(folder), "--no-input")
            assert run(["init-plugin", *given]) == 0

    return made_once(tmp_path_factory, "projects", make)


@pytest.mark.long
def test_all_kinds_at_once_install_pass_their_tests_and_are_named(projects: Path, tmp_path: Path) -> None:
    shutil.copytree(projects, tmp_path, dirs_exist_ok=True)  # building a wheel writes into its project
    folders = [f"my-{kind}" for kind in SLUGS]
    typed(tmp_path, *python(*PIP, str(tmp_path / "site"), *(f"./{folder}" for folder in folders)))
    typed(tmp_path, *python("-m", "pytest", "-q", "-p", "no:cacheprovider", "--junit-xml", "passed.xml", *folders))
    passed = {case.get("classname", "") for case in ElementTree.parse(tmp_path / "passed.xml").iter("testcase")}
    for kind in SLUGS:
        assert any(f"my-{kind}.tests." in name or f"test_{kind.replace('-', '_')}" in name for name in passed), kind
    check_names(tmp_path, SLUGS)


@pytest.fixture(scope="module")
def single_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one-file form of every kind, with tests."""
    folder = tmp_path_factory.mktemp("single-files")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for kind in SLUGS:
            assert run(["init-plugin", "-k", kind, "-n", f"my-{kind}", "--with-test"]) == 0
    return folder


def test_generated_code_passes_ruff(projects: Path, single_files: Path) -> None:
    config = str(projects / "my-transform/pyproject.toml")
    for folder, options in ((projects, ()), (single_files, ("--config", config))):
        for command in (("check", "--no-cache"), ("format", "--check", "--no-cache")):
            done = subprocess.run(
                python("-m", "ruff", *command, *options, "."), cwd=folder, capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_generated_code_passes_mypy_strict(projects: Path) -> None:
    sources = sorted(projects.glob("*/src"))
    checked = [*(str(path) for path in sorted(projects.glob("*/src/*"))), *map(str, projects.glob("*/tests/*.py"))]
    done = subprocess.run(
        python("-m", "mypy", "--strict", "--cache-dir", str(projects / ".mypy_cache"), *checked),
        cwd=projects,
        env={**os.environ, "MYPYPATH": os.pathsep.join(map(str, sources))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_kind_has_a_template_that_names_its_hook_and_imports_only_what_is_public(projects: Path) -> None:
    for kind in KINDS:
        variables = json.loads((template(slug(kind)) / "cookiecutter.json").read_text(encoding="utf-8"))
        assert variables["hook"] == HOOK_OF_KIND[kind]
        assert Kind(variables["kind"]) is kind
    for file in projects.rglob("*.py"):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith(("import retrain", "from retrain")):
                assert line.startswith(("from retrain.api", "from retrain.advantages", "from retrain.testing")), file


def test_plugin_modules_import_no_more_than_the_public_interface(projects: Path) -> None:
    kinds = sorted(set(SLUGS) - {"backend"})  # whose capabilities must be known before it is built
    names = [f"my_{kind.replace('-', '_')}" for kind in kinds]
    heavy = [f"{name}.{name.removeprefix('my_')}" for name in names]
    code = f"import sys, {', '.join(f'{name}.plugin' for name in names)}; print(set({heavy}) & set(sys.modules))"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(str(projects / f"my-{kind}/src") for kind in kinds)}
    done = subprocess.run(python("-c", code), env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
