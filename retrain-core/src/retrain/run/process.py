"""Prepares a process that runs `retrain`: its import path, `.env`, and libraries that print or spin too much."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from retrain.kernel.errors import ConfigError, Problem

QUIET = {
    "OMP_WAIT_POLICY": "PASSIVE",  # busy processes must not spin at barriers
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DATASETS_VERBOSITY": "error",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}


def prepare_process() -> bool:
    """Put the current folder on the path, load `.env` and quieten libraries; whether there was an `.env`.

    ConfigError when that cannot be used; the rest is done then.
    """
    import_from_here()
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    return load_dotenv_file()


def import_from_here() -> None:
    """Put the current folder on the import path: first, or last where Python is to be safe from it (`-P`)."""
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(len(sys.path) if sys.flags.safe_path else 0, here)


def python_command() -> tuple[str, ...]:
    """The command that starts another Python like this one; one that is safe from its folder starts such a one."""
    return (sys.executable, *(("-P",) if sys.flags.safe_path else ()))


def load_dotenv_file() -> bool:
    """Load `.env`, if there is one; a variable that is set already wins. ConfigError when it cannot be used."""
    if not Path(".env").is_file():
        return False
    from dotenv import dotenv_values, load_dotenv

    from retrain.text.secrets import LEARNED

    try:
        load_dotenv(".env", override=False)
        LEARNED.learn_environ(dotenv_values(".env"))  # a variable that is set already hides its line of the file
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a value with a NUL
        problem = Problem(what=f".env cannot be used: {error}", fix="write it in UTF-8, as lines of NAME=value")
        raise ConfigError(problem) from error
    return True
