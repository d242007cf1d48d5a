"""The place of a rerun: its folder, its environment, and the variables that its processes see."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from packaging.utils import canonicalize_name
from packaging.version import Version

from retrain.kernel.errors import BackendError, ConfigError, Problem
from retrain.records.identity.hashing import MODEL_WHOLE_BYTES, SAMPLED_ABOVE, Budget, hash_file
from retrain.records.manifest import THREADS
from retrain.records.record_names import CONFIG_FILE
from retrain.text.secrets import is_secret_variable
from retrain.text.terminal_text import printable
from retrain.tools.pack.archive import METADATA, Contents, refused
from retrain.tools.pack.wheels import CheckedWheel, ReadWheel, digest_of, pinned, read_wheel

RUN = "rerun"  # the log_dir of the run, below its folder
DROPPED = ("RETRAIN", "PYTHON", "VIRTUAL_ENV", "CONDA_", "WANDB_")
# An untrusted configuration must not reach an account or a scheduler of its user.
OWN: Mapping[str, Mapping[str, Any]] = {
    "logging": {"log_dir": RUN, "recorders": [], "wandb_project": "", "checkpoint_artifacts": False},
    "backend": {"adapter_path": "", "throttle_dir": ""},
    "campaign": {"launcher": "subprocess", "launcher_options": {}},
    # It would install packages that the listing does not name.
    "environment": {"auto_install": False},
}
# git obeys the settings of a folder that looks like a bare repository, and they can name a program.
GIT = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.bareRepository", "GIT_CONFIG_VALUE_0": "explicit"}


def environ_of(contents: Contents, passed: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rerun: no setting of retrain or Python, no secret that is not `passed`.

    Threads are the pack's, and of the installed plugins only the pack's are loaded.
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
    """Return the files that do not come from the pack, by place: `given` by the user, or found where the run had them.

    ConfigError names unknown and missing files.
    """
    if unknown := sorted(set(given) - {name for file in contents.files for name in (file.name, file.place)}):
        known = ", ".join(file.name for file in contents.files) or "(no files)"
        what, fix = f"the pack has no file {printable(unknown[0])!r}", f"its files: {printable(known)}"
        raise ConfigError(Problem(code="rerun.unknown-file", where="--data", what=what, fix=fix))
    found, problems = dict[str, Path](), list[Problem]()
    for file in contents.files:
        source = given.get(file.name) or given.get(file.place)
        if source is None and not file.member:
            # The place that the run had: one inside the rerun's folder may replace one outside of the run's.
            moved = (each for each in contents.moved.items() if f"{file.place}/".startswith(f"{each[1]}/"))
            old, new = next(moved, ("", ""))
            path = Path(old + file.place[len(new) :]).expanduser()
            whole = MODEL_WHOLE_BYTES if file.kind == "model" else SAMPLED_ABOVE
            now = hash_file(file.name, path, Budget(), sampled_above=whole, is_kept=False)
            source = path if now.hash == file.hash != "" else None
            if source is None:
                what = f"{printable(file.name)} ({file.size} bytes) is not in the pack"
                fix = f"--data {printable(file.name)}=PATH"
                problems.append(Problem(code="rerun.file-missing", where="pack", what=what, fix=fix))
        if source is not None:
            found[file.place] = source
    if problems:
        raise ConfigError(*problems)
    return found


def lay_out(contents: Contents, unpacked: Path, work: Path, chosen: Mapping[str, Path]) -> None:
    """Make the folder of the run: code and data where the configuration names them, and `config.toml`.

    `chosen` are the result of `chosen_files`; the other files are the pack's.
    """
    for file in contents.files:
        target = work / file.place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(chosen.get(file.place) or unpacked / file.member, target)
    (work / CONFIG_FILE).write_text(tomli_w.dumps(forced(contents.config())), encoding="utf-8")


def forced(tables: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with the values that a rerun sets; ConfigError if a campaign's condition sets one."""
    own = {name for keys in OWN.values() for name in keys}
    own |= {f"{table}_{name}" for table, keys in OWN.items() for name in keys}
    campaign = tables.get("campaign")
    for key in _keys(campaign.get("conditions") if isinstance(campaign, dict) else ()):
        if key.rpartition(".")[2].replace("-", "_") in own:
            what, fix = f"a condition sets {printable(key)}, but a rerun sets it", "pack single runs"
            raise ConfigError(Problem(code="rerun.condition-sets-key", where=CONFIG_FILE, what=what, fix=fix))
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


# The virtual environment, made only of wheels that the listing named with their hash.
#
# Requirements in metadata are not followed, nothing is built, and pip installs files of known SHA-256 without an index:
# the pack's wheels, and those that the user's pip downloaded for the listed versions.


Say = Callable[[str], None]
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def make_environment(
    contents: Contents,
    wheels: Sequence[CheckedWheel],
    unpacked: Path,
    folder: Path,
    environ: Mapping[str, str],
    say: Say,
    *,
    other_builds: bool,
) -> Path:
    """Make a virtual environment with the pack's wheels and the recorded packages; return its interpreter.

    pip downloads with the user's configuration: indexes, mirrors, folders of wheels. With `other_builds` a package may
    have other files than the pack recorded. ConfigError when it may not; BackendError when pip fails.
    """
    here = ".".join(map(str, sys.version_info[:2]))
    if not contents.python.startswith(f"{here}."):
        say(f"note: the run had Python {contents.python}; this makes an environment of {here}")
    _run([sys.executable, "-I", "-m", "venv", str(folder)], environ)
    # -I: neither the current folder nor PYTHON... variables decide which pip this is
    python, downloads = folder / ("Scripts" if os.name == "nt" else "bin") / "python", folder / "wheels"
    downloads.mkdir()
    wanted = [pinned(name, each["version"]) for name, each in contents.packages.items()]
    if wanted:
        options = ["--no-deps", "--only-binary", ":all:", "--dest", str(downloads)]
        _run([str(python), "-I", *PIP, "download", *options, *wanted], environ)
    files = [*_checked_downloads(contents, wheels, downloads, other_builds=other_builds)]
    hashes = [(unpacked / wheel.packed.member, wheel.sha256) for wheel in wheels]
    hashes += [(file, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
    listed = folder / "requirements.txt"
    listed.write_text("".join(f"{file.as_uri()} --hash=sha256:{digest}\n" for file, digest in hashes), encoding="utf-8")
    options = ["--no-index", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--requirement", str(listed)]
    _run([str(python), "-I", *PIP, "--isolated", "install", *options], environ)
    return python


def _checked_downloads(
    contents: Contents, wheels: Sequence[CheckedWheel], folder: Path, *, other_builds: bool
) -> list[Path]:
    files, problems = sorted(folder.iterdir()), list[Problem]()
    left = {canonicalize_name(name): each for name, each in contents.packages.items()}
    owners = {module: wheel.packed.name for wheel in wheels for module in wheel.modules}
    for file in files:
        with file.open("rb") as stream:
            read = read_wheel(file, file.name, stream)
        listed = left.pop(canonicalize_name(read.name), None)
        if listed is None or Version(read.version).public != Version(listed["version"]).public:
            what, fix = f"{file.name} is not in the list of the pack", "rerun in an environment of yours, with --here"
            raise refused(file, code="pack.unlisted-wheel", what=what, fix=fix)
        if both := sorted(read.modules & owners.keys()):
            what = f"{owners[both[0]]} and {read.name} both hold the module {both[0]!r}"
            fix = "ask the author for a pack with one of the two"
            raise refused(contents.opened.file, code="pack.module-twice", what=what, fix=fix)
        if not other_builds and (not listed["digest"] or _digest(read) != listed["digest"]):
            what = f"{read.name} {read.version} of your index has not the files that the pack lists"
            fix = "--here in an environment with that build, or --other-builds if another one will do"
            where = printable(str(contents.opened.file))
            problems.append(Problem(code="rerun.other-build", where=where, what=what, fix=fix))
    if left:
        what, fix = f"pip found no wheel for {', '.join(left)}", "rerun in an environment that has them, with --here"
        raise refused(contents.opened.file, code="rerun.wheel-not-found", what=what, fix=fix)
    if problems:
        raise ConfigError(*problems)
    return files


def _digest(read: ReadWheel) -> str:
    """Return the digest that the installed files will have: see `packages.installed_digests`."""
    files: dict[str, str] = {}
    for path, digest in read.files.items():
        top, _, rest = path.partition("/")
        kind, _, inside = rest.partition("/")
        if not top.endswith(".data"):
            files[path] = digest
        elif kind in ("purelib", "platlib"):
            files[inside] = digest
    return digest_of({path: each for path, each in files.items() if not path.partition("/")[0].endswith(METADATA)})


def _run(command: list[str], environ: Mapping[str, str]) -> None:
    done = subprocess.run(
        command, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        where, what = " ".join(command[:4]), "the environment cannot be made"
        why = "\n".join(printable(line) for line in (done.stderr or done.stdout).strip().splitlines()[-8:])
        fix = "correct pip's configuration (index, constraints), or rerun in an environment of yours with --here"
        raise BackendError(Problem(code="rerun.environment-failed", where=where, what=what, why=why, fix=fix))
