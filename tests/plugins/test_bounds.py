"""The size and shape of the house; `pytest -s -m "" tests/plugins/test_bounds.py` prints the counts."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import click
import pytest

from retrain.cli.command_line import RetrainGroup
from retrain.kernel import hooks
from retrain.kernel.plugins.discover import load_plugins

ROOT = Path(__file__).parents[2]
CORE = ROOT / "retrain-core/src/retrain"
TRAINING_MODULES, TRAINING_LINES, HOLDERS = 150, 18_000, 25
MODULES, LINES = 609, 99_970  # of all sources, stubs included; each bound is lowered when less is needed
STEP_LINES, HOOKS, OTHER_HOOKS, COMMANDS = 200, 39, 18, 28  # other hooks: those that register nothing
RUNS_NOT = ("tasks", "credit", "run", "engines")  # packages of which a comparison needs nothing
LOADED = """
import json, sys
from pathlib import Path
from retrain.cli.command_line import run
code = run(sys.argv[1:])
assert "transformers" not in sys.modules, "its import takes as long as the first steps of the built-in model"
files = {str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())}
print("\\n" + json.dumps([code, sorted(file for file in files if file.endswith(".py"))]))
"""
# Every function of ours that returns while it, or what it returns, holds what the policy sampled.
HOLDING = """
import json, sys, threading
from retrain.cli.command_line import run
held = set()

def holds(value, depth=3):
    if type(value).__name__ in ("Sample", "Completion", "Group", "TrainRow"):
        return True
    if not depth or not isinstance(value, (tuple, list, dict)) or not value:
        return False
    return holds(next(iter(value.values() if isinstance(value, dict) else value)), depth - 1)

def look(frame, event, result):
    file = frame.f_code.co_filename
    if event == "return" and file not in held and "retrain" in file:
        if holds(result) or any(holds(value) for value in list(frame.f_locals.values())):
            held.add(file)

sys.setprofile(look)
threading.setprofile(look)
code = run(sys.argv[1:])
sys.setprofile(None)
print("\\n" + json.dumps([code, sorted(held)]))
"""
SHORT = ("--max-steps", "2", "--eval-examples", "0")


def files_of(program: str, *arguments: str, folder: Path) -> list[Path]:
    """The files of ours that a program names after it has run a command in `folder`."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    code, files = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stderr
    return [path for file in files if (path := Path(file)).is_relative_to(package_root()) or "retrain_" in file]


def package_root() -> Path:
    import retrain

    return Path(retrain.__file__).parent


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bounds")
    subprocess.run([sys.executable, "-m", "retrain", "init", "--template", "tiny"], cwd=folder, check=True)
    return folder


@pytest.mark.slow
def test_a_training_run_and_a_comparison_load_what_they_need(trained: Path) -> None:
    loaded = files_of(LOADED, *SHORT, "--log-dir", "logs/a", folder=trained)
    core = [file for file in loaded if file.is_relative_to(package_root())]
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in core)
    print(f"\ntraining loads {len(core)} modules of the core (bound {TRAINING_MODULES})")
    print(f"with {lines} lines (bound {TRAINING_LINES})")
    compared = files_of(LOADED, "compare", "logs/a", folder=trained)
    inside = [file.relative_to(package_root()) for file in compared if file.is_relative_to(package_root())]
    needless = [str(file) for file in inside if file.parts[0] in RUNS_NOT and file.name not in ("__init__.py",)]
    print(f"compare loads of {', '.join(RUNS_NOT)}: {needless or 'nothing but their registrations'}")
    assert needless == []
    assert package_root() / "web.py" not in core, "a run that serves nothing loads no web server"
    assert len(core) <= TRAINING_MODULES
    assert lines <= TRAINING_LINES


@pytest.mark.slow
def test_few_files_hold_a_completion_between_prompt_and_record(trained: Path) -> None:
    held = files_of(HOLDING, *SHORT, "--log-dir", "logs/held", folder=trained)
    print(f"\n{len(held)} files hold a completion (bound {HOLDERS})")
    assert 5 < len(held) <= HOLDERS, "\n".join(map(str, held))


def test_the_step_and_its_doors_are_few() -> None:
    step = len((CORE / "kernel/step.py").read_text(encoding="utf-8").splitlines())
    names = [name for name in vars(hooks) if name.startswith("retrain_")]
    others = [name for name in names if not name.startswith("retrain_register_")]
    commands = RetrainGroup(load_plugins({})).list_commands(click.Context(click.Command("retrain")))
    print(f"\nkernel/step.py: {step} lines (bound {STEP_LINES})")
    print(f"{len(names)} hooks (bound {HOOKS}), {len(others)} without registration (bound {OTHER_HOOKS})")
    print(f"{len(commands)} commands in the help (bound {COMMANDS})")
    assert step < STEP_LINES
    assert len(names) <= HOOKS
    assert len(others) <= OTHER_HOOKS
    assert len(commands) <= COMMANDS


def test_there_are_few_modules_and_lines() -> None:
    files = [file for folder in ROOT.glob("retrain-*/src") for file in folder.rglob("*.py*") if file.suffix != ".pyc"]
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    print(f"\n{len(files)} modules (bound {MODULES}), {lines} lines (bound {LINES})")
    assert len(files) <= MODULES
    assert lines <= LINES


SOURCES = {folder.parent.name: folder for folder in sorted(ROOT.glob("retrain-*/src"))}
FILES = {file: folder for folder in SOURCES.values() for file in sorted(folder.rglob("*.py"))}
KERNEL = ROOT / "retrain-core/src/retrain/kernel"
FILE_LINES = 500  # a bound that is not reached
PLUGIN_WORDS = re.compile(r"\b(gtpo|hicra|sepa|gtpo_sepa|prime_rl|wandb|tinker)\b", re.IGNORECASE)
HTML = re.compile(
    r"</?(a|b|br|code|dd|details|div|dl|dt|figure|h[1-6]|li|p|pre|section|span|svg|table|td|th|tr|ul)\b[^<]*>"
)
METADATA = re.compile(r"^\s*(?:from|import) (?:importlib[._]metadata|pkg_resources)", flags=re.MULTILINE)
INSTALL_LINES = KERNEL / "plugins/first_party.toml"  # the table of what our own distributions provide


def module_name(file: Path, folder: Path) -> str:
    """`retrain.kernel.step` of a file below `retrain-core/src`; a package is named as it is imported."""
    return ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")


def imports(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements that run when a module or one of its functions does: all but those for type checkers."""
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield statement
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            yield from imports(statement.orelse)
        else:
            for name in ("body", "orelse", "finalbody"):
                yield from imports(getattr(statement, name, []))
            for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
                yield from imports(part.body)


def imported_by(file: Path, modules: Mapping[str, Path]) -> set[str]:
    """The modules of ours that a file imports, the most specific ones: `from a import b` means `a.b` if that is one."""
    found = set()
    for statement in imports(ast.parse(file.read_text(encoding="utf-8")).body):
        if isinstance(statement, ast.Import):
            found |= {name.name for name in statement.names}
        else:
            parts = [f"{statement.module}.{name.name}" for name in statement.names]
            found |= {part if part in modules else str(statement.module) for part in parts}
    return found & set(modules)


def test_there_is_no_circle_of_imports_in_any_distribution() -> None:
    modules = {module_name(file, folder): file for file, folder in FILES.items()}
    assert {"retrain.kernel.step", "retrain_sepa.plugin", "retrain_prime_rl.plugin"} <= set(modules)
    graph = {name: imported_by(file, modules) for name, file in modules.items()}
    assert sum(map(len, graph.values())) > 1000
    TopologicalSorter(graph).prepare()  # CycleError names the modules of a circle


def test_the_kernel_names_no_plugin_but_in_the_table_of_install_lines() -> None:
    found = [
        f"{file.relative_to(KERNEL)}:{number}: {line.strip()}"
        for file in sorted(KERNEL.rglob("*"))
        if file.is_file() and file.suffix != ".pyc" and file != INSTALL_LINES
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if PLUGIN_WORDS.search(line)
    ]
    assert not found, "\n" + "\n".join(found)


def test_one_package_reads_metadata_and_the_module_that_imports_only_python() -> None:
    readers = {file for file in FILES if METADATA.search(file.read_text(encoding="utf-8"))}
    outside = {file for file in readers if file.parent != KERNEL / "plugins"}
    assert outside == {KERNEL.parent / "tools/installation.py"}  # may be all that is left when ours was overwritten
    assert len(readers) > 3


def test_no_formatted_string_holds_html() -> None:
    """Pages are templates, which escape; `{x}` between tags of an f-string would not."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "_" for part in node.values)
                assert not HTML.search(text), f"{file}:{node.lineno}"


def test_no_source_file_is_too_long_to_read_at_once() -> None:
    lines = {str(file): len(file.read_text(encoding="utf-8").splitlines()) for file in FILES}
    assert {file: count for file, count in lines.items() if count > FILE_LINES} == {}
