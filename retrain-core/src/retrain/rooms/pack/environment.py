"""Where a rerun happens: its folder, a virtual environment of its own, and the variables that its processes see."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from retrain.kernel.errors import BackendError, ConfigError, Problem
from retrain.rooms.pack.contents import Contents, PlacedFile
from retrain.rooms.pack.gather import CONFIG
from retrain.rooms.pack.packages import pins
from retrain.rooms.session.identity.collect import MODEL_WHOLE_BYTES
from retrain.rooms.session.identity.hashing import SAMPLED_ABOVE, Budget, hash_file
from retrain.rooms.session.records.manifest import THREADS
from retrain.rooms.text.secrets import is_secret_variable
from retrain.rooms.text.terminal_text import printable

RUN = "rerun"  # the log_dir of the run, below its folder
DROPPED = ("RETRAIN", "PYTHON", "VIRTUAL_ENV", "CONDA_", "WANDB_")
# What must not reach an account or a scheduler of whoever runs a stranger's configuration.
OWN: Mapping[str, Mapping[str, Any]] = {
    "logging": {"log_dir": RUN, "recorders": [], "wandb_project": "", "checkpoint_artifacts": False},
    "backend": {"adapter_path": "", "throttle_dir": ""},
    "campaign": {"launcher": "subprocess", "launcher_options": {}},
}


def environ_of(contents: Contents, passed: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rerun: no setting of retrain or Python, no secret that is not `passed`, the pack's threads."""
    names = frozenset(passed)
    kept = {
        name: value
        for name, value in environ.items()
        if name in names or not (name.startswith(DROPPED) or name in THREADS or is_secret_variable(name))
    }
    return {**kept, **contents.threads, "PYTHONNOUSERSITE": "1"}


def chosen_files(contents: Contents, given: Mapping[str, Path]) -> dict[str, Path]:
    """Where each file lies that does not come from the pack, by its place: `given` by the user by name or place, or
    found where the run had it. ConfigError names what the pack does not have, and what is missing."""
    if unknown := sorted(set(given) - {name for file in contents.files for name in (file.name, file.place)}):
        known = ", ".join(file.name for file in contents.files) or "it has none"
        what, fix = f"the pack has no file {printable(unknown[0])!r}", f"its files: {printable(known)}"
        raise ConfigError(Problem(where="--data", what=what, fix=fix))
    found, problems = dict[str, Path](), list[Problem]()
    for file in contents.files:
        source = given.get(file.name) or given.get(file.place)
        if source is None and not file.member:
            source = _found_here(file, contents.moved)
            if source is None:
                what = f"{printable(file.name)} ({file.size} bytes) is not in the pack"
                problems.append(Problem(where="pack", what=what, fix=f"--data {printable(file.name)}=PATH"))
        if source is not None:
            found[file.place] = source
    if problems:
        raise ConfigError(*problems)
    return found


def lay_out(contents: Contents, unpacked: Path, work: Path, chosen: Mapping[str, Path]) -> None:
    """Make the folder in which the run happens: code and data where the configuration names them, and `config.toml`;
    `chosen` are those of `chosen_files`, the others are the pack's."""
    for file in contents.files:
        target = work / file.place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(chosen.get(file.place) or unpacked / file.member, target)
    tables: dict[str, Any] = contents.config()
    for table, keys in OWN.items():
        if isinstance(tables.get(table), dict):
            tables[table] |= {name: value for name, value in keys.items() if name in tables[table] or name == "log_dir"}
    tables.setdefault("logging", {"log_dir": RUN})
    (work / CONFIG).write_text(tomli_w.dumps(tables), encoding="utf-8")


def _found_here(file: PlacedFile, moved: Mapping[str, str]) -> Path | None:
    """A file that was left out, if it lies where the run read it and is the same."""
    place = next(
        (old + file.place[len(new) :] for old, new in moved.items() if f"{file.place}/".startswith(f"{new}/")),
        file.place,
    )
    path, whole = Path(place).expanduser(), MODEL_WHOLE_BYTES if file.kind == "model" else SAMPLED_ABOVE
    found = hash_file(file.name, path, Budget(), sampled_above=whole, is_kept=False)
    return path if found.hash == file.hash != "" else None


def make_environment(
    contents: Contents, unpacked: Path, folder: Path, environ: Mapping[str, str], say: Callable[[str], None]
) -> Path:
    """Make a virtual environment with the pack's wheels and the recorded versions; its interpreter.

    pip is the user's, with its configuration: indexes, mirrors, folders of wheels. BackendError when it fails.
    """
    here = ".".join(map(str, sys.version_info[:2]))
    if not contents.python.startswith(f"{here}."):
        say(f"note: the run had Python {contents.python}; this makes an environment of {here}")
    _run([sys.executable, "-m", "venv", str(folder)], environ)
    constraints = folder / "pins.txt"
    constraints.write_text(pins({name: each["version"] for name, each in contents.packages.items()}), encoding="utf-8")
    wheels = [
        f"{unpacked / wheel.member}{'[' + ','.join(wheel.extras) + ']' if wheel.extras else ''}"
        for wheel in contents.wheels
    ]
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*install, "--constraint", str(constraints), *wheels], environ)
    return python


def _run(command: list[str], environ: Mapping[str, str]) -> None:
    done = subprocess.run(
        command, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        why = "\n".join(printable(line) for line in (done.stderr or done.stdout).strip().splitlines()[-8:])
        fix = "correct pip's configuration (index, constraints), or rerun in an environment of yours with --here"
        raise BackendError(
            Problem(where=" ".join(command[:4]), what="the environment cannot be made", why=why, fix=fix)
        )
