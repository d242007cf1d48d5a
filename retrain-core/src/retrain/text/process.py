"""Prepares a process that runs `retrain`: streams, import path, `.env`, and libraries that print or spin too much."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from pathlib import Path

from retrain.kernel.errors import ConfigError, Problem
from retrain.text.secrets import LEARNED, redacted
from retrain.text.terminal_text import DUMB

COLOR_VARIABLES = ("NO_COLOR", "FORCE_COLOR")
QUIET = {
    "OMP_WAIT_POLICY": "PASSIVE",  # processes that share cores must not spin at barriers for long; some 20 microseconds
    # make sampling SmolLM2 1.3 times as fast on two free cores, and 1.1 times as slow on shared ones
    "GOMP_SPINCOUNT": "1000",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DATASETS_VERBOSITY": "error",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}


def prepare_process() -> bool:
    """Put the current folder on the path, load `.env` and quieten libraries; True if there was an `.env`.

    ConfigError when `.env` cannot be used, after everything else is done.
    """
    import_from_here()
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if not Path(".env").is_file():
        return False
    from dotenv import dotenv_values, load_dotenv

    try:
        load_dotenv(".env", override=False)
        LEARNED.learn_environ(dotenv_values(".env"))  # a variable that is set already hides its line of the file
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a value with a NUL
        what, fix = f".env cannot be used: {error}", "write it in UTF-8, as lines of NAME=value"
        raise ConfigError(Problem(code="config.bad-env-file", what=what, fix=fix)) from error
    return True


def import_from_here() -> None:
    """Put the current folder on the import path: first, or last if Python must not prefer it (`-P`)."""
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(len(sys.path) if sys.flags.safe_path else 0, here)


def python_command() -> tuple[str, ...]:
    """The command that starts another Python with the same `-P`."""
    return (sys.executable, *(("-P",) if sys.flags.safe_path else ()))


class RedactingStream(TextIOWrapper):
    """Writes to the file of another text stream without known secrets: messages, logs and tracebacks."""

    def __init__(self, stream: TextIOWrapper) -> None:
        super().__init__(
            stream.buffer,
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        self._first = stream  # collected, it would close the file

    def write(self, text: str) -> int:
        """Write the text; returns the length of the given text, as callers expect."""
        super().write(redacted(text))
        return len(text)


def prepare_streams() -> None:
    """Make printing safe.

    Known secrets are hidden, characters missing from the encoding become `?`, output to a closed stream is dropped.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - stays open until the process ends
        elif isinstance(stream, TextIOWrapper):
            if stream.encoding.lower().replace("-", "") != "utf8":
                stream.reconfigure(errors="replace")
            # Both streams write to one file: text that the first still holds must come before the second's.
            stream.flush()
            setattr(sys, name, RedactingStream(stream))
    for name in COLOR_VARIABLES:
        if os.environ.get(name) == "":
            del os.environ[name]  # empty means absent by convention, but rich reads FORCE_COLOR= as "no"


def wants_color() -> bool | None:
    """False for `NO_COLOR` or a dumb terminal, True for `FORCE_COLOR`; None: only if the stream is a terminal.

    The rules are rich's, since it prints tables and panels; an empty variable counts as absent.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return False if os.environ.get("TERM", "").lower() in DUMB else None


def is_interactive() -> bool:
    """True if stdin and stdout are both a terminal, so that the user can be prompted."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def drop_stdout() -> None:
    """Discard buffered output, so that flushing at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
