"""Where a rerun happens: its folder, and the variables that its processes see."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from retrain.kernel.errors import ConfigError, Problem
from retrain.records.identity.hashing import MODEL_WHOLE_BYTES, SAMPLED_ABOVE, Budget, hash_file
from retrain.records.manifest import THREADS
from retrain.records.record_names import CONFIG_FILE
from retrain.text.secrets import is_secret_variable
from retrain.text.terminal_text import printable
from retrain.tools.pack.contents import Contents, PlacedFile

RUN = "rerun"  # the log_dir of the run, below its folder
DROPPED = ("RETRAIN", "PYTHON", "VIRTUAL_ENV", "CONDA_", "WANDB_")
# What must not reach an account or a scheduler of whoever runs a stranger's configuration.
OWN: Mapping[str, Mapping[str, Any]] = {
    "logging": {"log_dir": RUN, "recorders": [], "wandb_project": "", "checkpoint_artifacts": False},
    "backend": {"adapter_path": "", "throttle_dir": ""},
    "campaign": {"launcher": "subprocess", "launcher_options": {}},
    "environment": {"auto_install": False},  # it would install what the listing does not name
}
# A folder whose files look like a bare repository would have its own settings obeyed, which can name a program.
GIT = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.bareRepository", "GIT_CONFIG_VALUE_0": "explicit"}


def environ_of(contents: Contents, passed: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rerun: no setting of retrain or Python, no secret that is not `passed`, the pack's threads.

    Of the installed plugins only those of the pack are loaded.
    """
    names = frozenset(passed)
    kept = {
        name: value
        for name, value in environ.items()
        if name in names or not (name.startswith(DROPPED) or name in THREADS or is_secret_variable(name))
    }
    plugins = ",".join(wheel.name for wheel in contents.wheels)
    return {**kept, **contents.threads, **GIT, "PYTHONNOUSERSITE": "1", "RETRAIN_PLUGINS": plugins}


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
    (work / CONFIG_FILE).write_text(tomli_w.dumps(forced(contents.config())), encoding="utf-8")


def forced(tables: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the values that a rerun sets itself; ConfigError if a condition of a campaign sets one."""
    own = {name for keys in OWN.values() for name in keys}
    own |= {f"{table}_{name}" for table, keys in OWN.items() for name in keys}
    campaign = tables.get("campaign")
    for key in _keys(campaign.get("conditions") if isinstance(campaign, dict) else ()):
        if key.rpartition(".")[2].replace("-", "_") in own:
            what, fix = f"a condition sets {printable(key)}, which a rerun sets itself", "pack single runs"
            raise ConfigError(Problem(where=CONFIG_FILE, what=what, fix=fix))
    for table, keys in OWN.items():
        if isinstance(tables.get(table), dict):
            tables[table] |= {name: value for name, value in keys.items() if name in tables[table] or name == "log_dir"}
    tables.setdefault("logging", {"log_dir": RUN})
    return tables


def _keys(value: Any) -> Iterator[str]:
    for each in value if isinstance(value, list) else ():
        yield from _keys(each)
    for name, each in value.items() if isinstance(value, dict) else ():
        yield str(name)
        yield from _keys(each)


def _found_here(file: PlacedFile, moved: Mapping[str, str]) -> Path | None:
    """A file that was left out, if it lies where the run read it and is the same."""
    place = next(
        (old + file.place[len(new) :] for old, new in moved.items() if f"{file.place}/".startswith(f"{new}/")),
        file.place,
    )
    path, whole = Path(place).expanduser(), MODEL_WHOLE_BYTES if file.kind == "model" else SAMPLED_ABOVE
    found = hash_file(file.name, path, Budget(), sampled_above=whole, is_kept=False)
    return path if found.hash == file.hash != "" else None
