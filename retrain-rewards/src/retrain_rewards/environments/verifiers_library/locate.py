"""Finds the library and an environment's module, or installs it from the Prime Hub, or says how to."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from difflib import get_close_matches
from types import ModuleType

from retrain.api import installed_dependents
from retrain_rewards.environments.verifiers_library.settings import Settings

BUILT_IN = "verifiers.v1.tasksets"


def find_module(settings: Settings) -> ModuleType:
    """The environment's module, installed from its hub first with `auto_install`; ConfigError says what is missing."""
    module = _module_name(settings)
    if module is None and settings.auto_install and settings.hub_id:
        install(settings)
        importlib.invalidate_caches()
        module = _module_name(settings)
        if module is None:
            what = f"{settings.id!r} was installed, but there is still no module {_candidates(settings)[-1]!r}"
            raise settings.problem("id", what, fix="look up the name of the package on the hub")
    if module is None:
        raise _not_installed(settings)
    try:
        return importlib.import_module(module)
    except BaseException as error:  # a module may raise what it likes, and exit
        if isinstance(error, KeyboardInterrupt):
            raise
        what = f"importing {module!r} failed: {type(error).__name__}: {error}"
        raise settings.problem("id", what, fix=f"make `python -c 'import {module}'` work") from error


def _candidates(settings: Settings) -> tuple[str, ...]:
    module = settings.name.replace("-", "_")
    return (f"{BUILT_IN}.{module.lower()}", module, module.lower())


def _module_name(settings: Settings) -> str | None:
    for module in _candidates(settings):
        try:
            if importlib.util.find_spec(module) is not None:
                return module
        except (ImportError, ValueError, AttributeError):
            continue
    return None


def _not_installed(settings: Settings) -> Exception:
    installed = [name for name in installed_dependents("verifiers") if "retrain" not in name]
    near = get_close_matches(settings.name.replace("_", "-"), installed, n=3)
    why = f"installed environments: {', '.join(installed[:20]) or 'none'}"
    if near:
        why = f"near names among the installed ones: {', '.join(near)}"
    fix = 'install its package, or write the id with its owner ("owner/name") and set auto_install = true'
    if settings.hub_id:
        fix = f"set auto_install = true, or run: {manual_command(settings)}"
    return settings.problem("id", f"environment {settings.id!r} is not installed", why=why, fix=fix)


INSTALL_TIMEOUT_S = 300.0  # an environment may have a gigabyte of requirements
LIBRARY_INSTALLER = "verifiers.legacy.scripts.install"  # `vf-install`; the classic generation alone has it


def manual_command(settings: Settings) -> str:
    return f"pip install prime && prime env install {settings.hub_id}"


def install(settings: Settings) -> None:
    """Install `owner/name[@version]` into this interpreter's environment; ConfigError with the reason when it fails."""
    command = [sys.executable, "-m", LIBRARY_INSTALLER, settings.hub_id]
    if prime := shutil.which("prime"):
        command = [prime, "env", "install", settings.hub_id]
    environ = {**os.environ, "VIRTUAL_ENV": sys.prefix, "PYTHONIOENCODING": "utf-8"}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,  # it must not wait for input
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=environ,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
        )
        reason = _reason(done.stderr) or _reason(done.stdout) or f"ended with code {done.returncode}"
    except (subprocess.TimeoutExpired, OSError) as error:
        is_late = isinstance(error, subprocess.TimeoutExpired)
        reason = f"took longer than {INSTALL_TIMEOUT_S:g} s" if is_late else str(error)
    else:
        if not done.returncode:
            return
    what = f"installing {settings.hub_id!r} from the Prime Hub failed"
    fix = f"check the name and the connection, or install it by hand: {manual_command(settings)}"
    raise settings.problem("auto_install", what, why=reason, fix=fix)


def _reason(output: str) -> str:
    """The lines that say what went wrong: the last three, without a traceback's code."""
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("  ")]
    return "\n    ".join(line[:300] for line in lines[-3:])
