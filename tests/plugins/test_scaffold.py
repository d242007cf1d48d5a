"""`init-plugin` for every kind: a distribution passes its tests and is listed, one file is selected from TOML.

One kind is tried at every change, and all of them, installed by one pip and tested by one pytest, in `nox -s proofs`.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from retrain.cli.command_line import run
from retrain.cli.scaffold.render import KINDS, slug, template
from retrain.kernel.registry import HOOK_OF_KIND
from retrain.kernel.types import Kind
from tests.end_to_end.running import SCRIPT, records, retrain
from tests.kit.shared import made_once, slow_or_long

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
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lab")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for kind in SLUGS:
            assert run(["init-plugin", "--kind", kind, "--name", f"my-{kind}", "--with-test"]) == 0
    return folder


def test_generated_code_passes_ruff(projects: Path, lab: Path) -> None:
    config = str(projects / "my-transform/pyproject.toml")
    for folder, options in ((projects, ()), (lab, ("--config", config))):
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


MODEL = '[model]\nmodel = "builtin:tiny"\nlora_rank = 4\n[backend]\ndevices = "cpu"\n'
SHORT = (
    *("--max-steps", "1", "--batch-size", "2", "--group-size", "4", "--max-tokens", "24", "--seed", "1"),
    *("--lr", "0.003", "--temperature", "1.0", "--save-every", "0", "--log-dir", "logs/run"),
)


def trained(lab: Path, toml: str, *arguments: str) -> dict[str, object]:
    """Train as the TOML says; the last line of its metrics."""
    file = lab / f"{abs(hash(toml))}.toml"
    file.write_text(toml, encoding="utf-8")
    outcome = retrain(file.name, *SHORT, *arguments, cwd=lab)
    assert outcome.code == 0, outcome.err
    return records(lab / "logs/run/metrics.jsonl")[-1]


@pytest.mark.long
def test_their_tests_pass_from_any_folder(lab: Path, tmp_path: Path) -> None:
    typed(tmp_path, *python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(lab / "tests")))


def test_the_parts_of_a_run_are_selected_from_toml(lab: Path) -> None:
    line = trained(
        lab,
        MODEL + '[algorithm]\nadvantage_mode = "my_advantage.leave_one_out"\n'
        'transform_mode = "my_transform.PLUGIN"\ntransform_params = { floor = 1.0 }\n'
        'uncertainty_kind = "my_uncertainty.SPEC"\n'
        '[data]\nsource = "my_data_source.PLUGIN"\noptions = { digits = 1, size = 45 }\n'
        'sampler = "my_sampler.PLUGIN"\nsampler_params = { floor = 0.5 }\n'
        '[reward]\ntype = "my_reward.PLUGIN"\n[inference]\nengine = "my_inference_engine.PLUGIN"\n'
        '[logging]\nrecorders = ["my_recorder.create"]\n',
    )
    assert line["condition"] == "my_advantage.leave_one_out+my_transform"
    assert line["sampler"] == "my_sampler.PLUGIN"
    assert float(str(line["floor_lifted_frac"])) > 0.2
    with (lab / "logs/run/metrics.csv").open(encoding="utf-8") as stream:
        rows = {(row["step"], row["metric"]): float(row["value"]) for row in csv.DictReader(stream)}
    assert rows["0", "loss"] == line["loss"]


@pytest.mark.parametrize(
    ("toml", "key", "value"),
    slow_or_long(
        [
            (
                MODEL + '[algorithm]\nalgorithm_mode = "my_algorithm.SPEC"\n[environment]\n'
                'provider = "my_environment.create"\nargs = { highest = 3, tasks = 3 }\nmax_turns = 2\n',
                "condition",
                "my_algorithm",
            ),
            (
                MODEL + '[algorithm]\ntransform_mode = "gtpo_hicra"\n[planning]\n'
                'detector = "my_planning_detector.PLUGIN"\n[data]\nsource = "arithmetic"\n',
                "condition",
                "maxrl+gtpo_hicra",
            ),
            (
                '[model]\nmodel = "builtin:tiny"\n[backend]\nbackend = "my_backend.PLUGIN"\n'
                'options = { step_size = 0.1 }\n[data]\nsource = "arithmetic"\n',
                "step",
                0,
            ),
        ]
    ),
    ids=["algorithm and environment", "planning detector", "backend"],
)
def test_other_parts_are_selected_from_toml(lab: Path, toml: str, key: str, value: object) -> None:
    assert trained(lab, toml)[key] == value
    used = tomllib.loads((lab / "logs/run/config.toml").read_text(encoding="utf-8"))["backend"]["backend"]
    assert used == ("my_backend.PLUGIN" if "my_backend" in toml else "local")
