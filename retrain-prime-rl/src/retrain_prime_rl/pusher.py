"""The older wire over ZeroMQ: one socket that connects to the trainer's packer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import zmq

from retrain.api import BackendError, ConfigError, Problem

LINGER_MS = 2000
POLL_S = 0.05


class Pusher:
    """Pushes (name of the run, batch) to `host:port`; only to a connected packer, so that nothing queues unseen."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        hwm: int,
        sender: str,
        ready_wait_s: float,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._address = f"tcp://{host}:{port}"
        self._sender = sender.encode()
        self._wait_s = ready_wait_s
        self._check_stop = check_stop
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, hwm)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        try:
            self._socket.connect(self._address)
        except zmq.ZMQError as error:
            self.close()
            what = f"{self._address} is not an address to connect to: {error.strerror}"
            raise ConfigError(Problem(where="[backend.options] zmq_host", what=what, fix="correct it")) from error

    def send(self, step: int, payloads: Sequence[bytes]) -> None:
        """Push the one payload of a step; BackendError when no packer takes it in time."""
        deadline = time.monotonic() + self._wait_s
        (payload,) = payloads
        while True:
            try:
                self._socket.send_multipart([self._sender, payload], flags=zmq.DONTWAIT)
                return
            except zmq.Again:
                if time.monotonic() >= deadline:
                    what = f"no packer at {self._address} took step {step} within {self._wait_s:g} s"
                    fix = "start the trainer with this zmq host and port, or raise ready_wait_s"
                    raise BackendError(Problem(where="[backend.options] zmq_port", what=what, fix=fix)) from None
                self._check_stop()  # nothing of this step has been sent yet
                time.sleep(POLL_S)

    def serve_ranks(self) -> None:
        """Nothing to do: the packer keeps what it has received."""

    def forget(self, before: int) -> None:
        """Nothing to do: what was sent is with the packer."""

    def close(self) -> None:
        """Flush queued messages briefly, then release the socket."""
        if not self._context.closed:
            self._socket.close(linger=LINGER_MS)
            self._context.term()
