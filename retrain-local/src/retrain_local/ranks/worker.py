"""`python -m retrain_local.ranks.worker FD`: another rank, executing the calls of rank 0 until it ends."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from retrain.api import BackendError, PluginContext, Problem, RetrainError, Sample, load_plugins
from retrain_local.devices.group import join, open_store
from retrain_local.ranks.workers import Answer, Call, Delivered, Start, Stop, StoppedError, receive, send

PARENT_S = 0.5
log = logging.getLogger("retrain")


class Caller:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def check_stop(self) -> None:
        """Raise StoppedError when rank 0 has stopped the call in progress."""
        if self._connection.poll():
            message = receive(self._connection)
            assert isinstance(message, Stop), f"{message} during a call"
            what, fix = "rank 0 has stopped this call", "see the reason that rank 0 gives"
            raise StoppedError(Problem(code="backend.rank-stopped", what=what, fix=fix))

    def serve(self, backend: Any) -> None:
        """Execute calls until rank 0 is gone, or this rank has left the others in the middle of a step."""
        while not backend.is_broken:
            message = receive(self._connection)
            if isinstance(message, Call):
                send(self._connection, self._answer(backend, message))

    def _answer(self, backend: Any, call: Call) -> Answer:
        def deliver(request: int, place: int, sample: Sample) -> None:
            send(self._connection, Delivered(number=call.number, request=request, place=place, sample=sample))

        given = (*call.args, deliver) if call.name == "sample" else call.args
        try:
            return Answer(number=call.number, value=getattr(backend, call.name)(*given))
        except RetrainError as error:
            return Answer(number=call.number, error=error)
        except Exception as error:  # rank 0 reports it; a worker has no other way to say so
            log.exception("in %s", call.name)
            what, fix = f"a rank failed: {type(error).__name__}: {error}", "read its traceback above"
            problem = Problem(code="backend.rank-failed", what=what, fix=fix)
            return Answer(number=call.number, error=BackendError(problem))


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # rank 0 handles these for all
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    connection = Connection(int(sys.argv[1]))
    try:
        _serve(connection)
    except (EOFError, ConnectionError):
        pass  # rank 0 has ended
    except BaseException:
        log.exception("this rank ends")
        os._exit(1)
    os._exit(0)  # without waiting for other ranks that may be gone


def _serve(connection: Connection) -> None:
    start = receive(connection)
    assert isinstance(start, Start)
    logging.basicConfig(level=logging.WARNING, format=f"rank {start.rank}: %(message)s")
    import torch  # seconds, in which rank 0 waits

    from retrain_local.backend import create_local
    from retrain_local.devices.torch_devices import choose_devices

    caller = Caller(connection)
    context = PluginContext(
        config=start.config,
        seeds=start.seeds,
        plugins=load_plugins(),
        params=start.params,
        tokenizer=SimpleNamespace(eos_token_id=start.stop_id),
        check_stop=caller.check_stop,
    )
    torch.set_num_threads(start.threads)
    send(connection, Answer())
    try:
        devices = choose_devices(context.config)
        group = join(open_store(start.port, is_master=False), start.rank, devices, context.config)
        backend = create_local(context, devices.of_rank(start.rank), group)
    except RetrainError as error:
        send(connection, Answer(error=error))
        return
    send(connection, Answer())
    caller.serve(backend)


def _end_with(parent: int) -> None:
    """End this process when its parent has ended, even in the middle of a collective operation."""
    while os.getppid() == parent:
        time.sleep(PARENT_S)
    os._exit(1)


if __name__ == "__main__":
    main()
