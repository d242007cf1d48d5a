"""How large the house is, and how much a command enters; `pytest -s -m "" tests/plugins/test_bounds.py` says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

from retrain.cli.command_line import RetrainGroup
from retrain.kernel import hooks
from retrain.kernel.plugins.discover import load_plugins

ROOT = Path(__file__).parents[2]
CORE = ROOT / "retrain-core/src/retrain"
TRAINING_MODULES, TRAINING_LINES, HOLDERS = 150, 18_000, 25
MODULES, LINES = 600, 93_500  # of all sources, stubs included; each bound is lowered when less is needed
STEP_LINES, HOOKS, OTHER_HOOKS, COMMANDS = 200, 39, 18, 28  # other hooks: those that register nothing
RUNS_NOT = ("tasks", "credit", "run", "engines")  # packages of which a comparison needs nothing
LOADED = """
import json, sys
from pathlib import Path
from retrain.cli.command_line import run
code = run(sys.argv[1:])
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
