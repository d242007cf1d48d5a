"""Installs an environment from the Prime Hub, with the `prime` command or the library's installer."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys

from retrain_rewards.verifiers.settings import Settings

INSTALL_TIMEOUT_S = 300.0  # an environment may have a gigabyte of requirements
LIBRARY_INSTALLER = "verifiers.legacy.scripts.install"  # `vf-install`; the classic generation alone has it


def manual_command(settings: Settings) -> str:
    """The command that installs this environment."""
    return f"pip install prime && prime env install {settings.hub_id}"


def install(settings: Settings) -> None:
    """Install `owner/name[@version]` into this interpreter's environment; ConfigError with the reason when it fails."""
    command = _command(settings.hub_id)
    if command is None:
        what = f"{settings.id!r} cannot be installed: neither the command prime nor the library's installer exists"
        raise settings.problem("auto_install", what, fix=manual_command(settings))
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
    except subprocess.TimeoutExpired:
        raise _failed(settings, f"took longer than {INSTALL_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise _failed(settings, str(error)) from error
    if done.returncode:
        raise _failed(settings, _reason(done.stderr) or _reason(done.stdout) or f"ended with code {done.returncode}")


def _command(hub_id: str) -> list[str] | None:
    prime = shutil.which("prime")
    if prime is not None:
        return [prime, "env", "install", hub_id]
    try:
        found = importlib.util.find_spec(LIBRARY_INSTALLER) is not None
    except ImportError:
        found = False
    return [sys.executable, "-m", LIBRARY_INSTALLER, hub_id] if found else None


def _reason(output: str) -> str:
    """The lines that say what went wrong: the last three, without a traceback's code."""
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("  ")]
    return "\n    ".join(line[:300] for line in lines[-3:])


def _failed(settings: Settings, reason: str) -> Exception:
    what = f"installing {settings.hub_id!r} from the Prime Hub failed"
    fix = f"check the name and the connection, or install it by hand: {manual_command(settings)}"
    return settings.problem("auto_install", what, why=reason, fix=fix)
