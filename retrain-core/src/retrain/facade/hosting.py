"""What a call from Python needs besides a command line: values as flags, and a process that stays as it was."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from retrain.kernel.config.toml_file import toml_text
from retrain.kernel.errors import RetrainError
from retrain.text.secrets import hide_text
from retrain.text.terminal_text import printable


def arguments_of(overrides: Mapping[str, Any]) -> list[str]:
    """Keywords as flags: `lr=1e-4` is `--lr=0.0001`."""
    given = {name.replace("_", "-"): plain(value) for name, value in overrides.items()}
    return [f"--{name}={each if isinstance(each, str) else toml_text(each)}" for name, each in given.items()]


def plain(value: Any) -> Any:
    """A value as TOML has it: paths become texts, tuples lists, NumPy's numbers numbers."""
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0 else value


@contextmanager
def briefly_told() -> Iterator[None]:
    """Let a notebook show the text of our errors, as a terminal does, and not the stack of calls that led to them.

    A notebook keeps its last error: the frames of the run, with the model in them, must not live as long as that.
    """
    try:
        yield
    except (RetrainError, KeyboardInterrupt) as error:
        each: BaseException | None = error
        while each is not None:
            traceback.clear_frames(each.__traceback__)
            each = each.__cause__ or each.__context__
        if isinstance(error, RetrainError):
            lines = hide_text(f"retrain: {error.label}\n{error}").split("\n")
            error.__dict__["_render_traceback_"] = lambda: list(map(printable, lines))  # IPython asks for it
        raise


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Let an interrupt wait until the end of the block: half an imported library would break the process for good."""
    if threading.current_thread() is not threading.main_thread():
        yield  # where no signal arrives
        return
    came: list[FrameType | None] = []
    before = signal.signal(signal.SIGINT, lambda _, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(signal.SIGINT, came[0])


@contextmanager
def restored_imports() -> Iterator[None]:
    """Take back what a run adds to the import path, and forget the modules that were copied for it."""
    path, modules = list(sys.path), set(sys.modules)
    try:
        yield
    finally:
        added = [folder for folder in sys.path if folder not in path]
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if os.path.dirname(file) in added:
                del sys.modules[name]
