"""The worker: receives one object from the run, and answers calls of its methods one at a time."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from retrain.kernel import errors
from retrain.kernel.errors import raised_at
from retrain.tasks.child import wire
from retrain.tasks.child.system import descendants, has_children, kill_descendants

MAX_TEXT = 2000  # characters of an exception's text
MAX_FRAMES = 8  # of a traceback: user code may have recursed
MAX_TRACEBACK = 4000
# The call of an environment whose processes, such as tool servers, serve later calls and are not killed after it.
SETS_UP = "load"


def serve(descriptor: int) -> NoReturn:
    """Unpickle the object, prepare it, and answer calls until the run is gone.

    Unpickling is safe: the bytes come from the process that started this one and controls it anyway. Nothing is pickled
    the other way.
    """
    own = os.getpid()
    connection = socket.socket(fileno=descriptor)
    content = wire.receive(connection, timeout_s=None)
    if content is None:
        os._exit(0)
    started = time.perf_counter()
    try:
        target = pickle.loads(content)
        prepare = getattr(target, "prepare", None)
        if prepare is not None:
            prepare()
        reply: dict[str, Any] = {"seconds": time.perf_counter() - started}
    except BaseException as error:
        target, reply = None, failure(error)
    _stay_alone(own)
    _answer(connection, wire.dumps(reply))
    helpers = frozenset(descendants(own)) if has_children() else frozenset()
    while True:
        frame = wire.receive(connection, timeout_s=None)
        if frame is None:
            os._exit(0)
        call = wire.loads(frame)
        _answer(connection, b'"started"')
        started = time.perf_counter()
        try:
            value = getattr(target, call["method"])(*call["arguments"])
            answer = wire.dumps({"value": value, "seconds": time.perf_counter() - started})
        except BaseException as error:  # user code may raise anything, even SystemExit
            answer = wire.dumps(failure(error) | {"seconds": time.perf_counter() - started})
        _stay_alone(own)
        with suppress(OSError):
            # An alarm that this call has set must not end the next one.
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        if has_children():
            if call["method"] == SETS_UP:
                helpers = frozenset(descendants(own))
            with suppress(OSError):
                kill_descendants(but=helpers)
        _answer(connection, answer)


def failure(error: BaseException) -> dict[str, Any]:
    try:
        text = str(error)[:MAX_TEXT]
    except BaseException:  # user code again
        text = "(its text cannot be shown)"
    try:
        trace = "".join(traceback.format_exception(error, limit=-MAX_FRAMES))[-MAX_TRACEBACK:]
    except BaseException:
        trace = ""
    place = ""
    with suppress(BaseException):
        place = raised_at(error)
    report: dict[str, Any] = {"error": type(error).__name__, "text": text, "place": place, "traceback": trace}
    if isinstance(error, errors.RetrainError):
        own_kinds = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        report["kind"] = next(own_kinds)
        report["problems"] = list(error.problems)
    return report


def _stay_alone(own: int) -> None:
    if os.getpid() != own:
        os._exit(0)


def _answer(connection: socket.socket, content: bytes) -> None:
    try:
        wire.send(connection, content, timeout_s=None)
    except BaseException as error:  # user code may have closed the connection
        with suppress(BaseException):
            print(f"no answer could be sent: {error}", file=sys.stderr)
        os._exit(1)
