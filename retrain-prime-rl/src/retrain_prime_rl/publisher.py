"""The per-token wire over ZeroMQ: a publisher for the batches, and a socket on which ranks say that they are ready.

A plain publisher drops silently what is sent to a rank that has not subscribed yet, or whose queue is full. This one
is an XPUB socket, which to a subscriber is the same but shows who has subscribed, and it refuses instead of dropping.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from retrain.api import BackendError, ConfigError, Problem

LOG = logging.getLogger("retrain")
TOPIC = "data_rank|{}|"
LINGER_MS = 2000
LOOK_MS = 50  # how often a stop is looked for while a rank is waited for
WHERE = "[backend.options] zmq_port"


@dataclass(slots=True, kw_only=True)
class Rank:
    """What is known of a rank. A rank that was restarted says again that it is ready."""

    subscriptions: int = 0  # that are open now
    subscribed: int = 0  # ever
    announced: int = 0  # times that it said it was ready
    owed: bool = False  # came back after the step was sent, and has not got it

    def is_here(self, *, is_known: bool) -> bool:
        """It has announced itself and its latest subscription has arrived: what is sent now reaches it.

        A rank that an earlier life of this run has sent to (`is_known`) does not announce itself again.
        """
        return self.subscriptions > 0 and self.subscribed >= self.announced >= (not is_known)


class Publisher:
    """Binds `port` for batches (topic `data_rank|<R>|`) and `port + 1` for one message per rank, its number as text."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        hwm: int,
        ranks: int,
        ready_wait_s: float,
        is_resumed: bool = False,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._ranks = [Rank() for _ in range(ranks)]
        self._is_known = is_resumed
        self._step = -1
        self._wait_s = ready_wait_s
        self._check_stop = check_stop
        self._payloads: Sequence[bytes] = ()
        self._context = zmq.Context()
        self._batches = self._context.socket(zmq.XPUB)
        self._batches.setsockopt(zmq.SNDHWM, hwm)
        self._batches.setsockopt(zmq.XPUB_VERBOSER, 1)  # show the subscription of a rank's second life too
        self._batches.setsockopt(zmq.XPUB_NODROP, 1)
        self._ready = self._context.socket(zmq.PULL)
        self._ready.setsockopt(zmq.RCVHWM, hwm)
        for socket, number in ((self._batches, port), (self._ready, port + 1)):
            self._bind(socket, host, number)

    def send(self, step: int, payloads: Sequence[bytes]) -> None:
        """Publish a step to all ranks, once all of them are there; BackendError names those that do not come."""
        deadline = time.monotonic() + self._wait_s
        self._await_ranks(step, deadline)
        self._step, self._payloads = step, tuple(payloads)
        for rank, payload in enumerate(payloads):
            self._publish(rank, payload, deadline)

    def tend(self) -> None:
        """Send the step again to every rank that was restarted after it was sent: what it had received is lost."""
        self._listen()
        for number, rank in enumerate(self._ranks):
            if rank.owed and rank.is_here(is_known=False):
                LOG.warning("Data rank %d was restarted: sending it the current step again.", number)
                self._publish(number, self._payloads[number], time.monotonic())
                rank.owed = False

    def close(self) -> None:
        """Give what is queued a moment to leave, then release the ports."""
        if not self._context.closed:
            self._batches.close(linger=LINGER_MS)
            self._ready.close(linger=0)
            self._context.term()

    def _bind(self, socket: zmq.Socket[bytes], host: str, port: int) -> None:
        address = f"tcp://{'127.0.0.1' if host == 'localhost' else host}:{port}"
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            what = f"{address} cannot be bound: {error.strerror}"
            fix = "give an address of this machine as zmq_host, and a zmq_port that is free, and the next one too"
            raise ConfigError(Problem(where=WHERE, what=what, fix=fix)) from error

    def _await_ranks(self, step: int, deadline: float) -> None:
        self._listen()
        missing = self._missing()
        if missing:
            LOG.info("Waiting for data ranks %s of the trainer ...", ", ".join(map(str, missing)))
        while missing := self._missing():
            if time.monotonic() >= deadline:
                self._refuse(missing, step)
            self._check_stop()  # nothing of this step was sent yet
            self._ready.poll(LOOK_MS)
            self._listen()
        for rank in self._ranks:
            rank.owed = False  # they come back to a step that is yet to be sent

    def _missing(self) -> list[int]:
        return [number for number, rank in enumerate(self._ranks) if not rank.is_here(is_known=self._is_known)]

    def _refuse(self, missing: list[int], step: int) -> None:
        what = f"data ranks {', '.join(map(str, missing))} of the trainer are not there for its step {step}"
        why = f"waited {self._wait_s:g} s for {len(self._ranks)} ranks"
        fix = "start the trainer with the same zmq port and data_world_size, or raise ready_wait_s"
        raise BackendError(Problem(where=WHERE, what=what, why=why, fix=fix))

    def _publish(self, rank: int, payload: bytes, deadline: float) -> None:
        message = [TOPIC.format(rank).encode(), payload]
        while True:
            try:
                self._batches.send_multipart(message, flags=zmq.DONTWAIT)
                return
            except zmq.Again:
                if time.monotonic() >= deadline:
                    what = f"data rank {rank} has not taken what was sent before: zmq_hwm messages are waiting for it"
                    fix = "look why the trainer hangs, then resume the run"
                    raise BackendError(Problem(where=f"step {self._step}", what=what, fix=fix)) from None
                time.sleep(LOOK_MS / 1000)

    def _listen(self) -> None:
        """Take in every subscription and announcement that has arrived."""
        while self._batches.poll(0):
            self._subscription(self._batches.recv())
        while self._ready.poll(0):
            self._announcement(self._ready.recv())

    def _subscription(self, message: bytes) -> None:
        for number, rank in enumerate(self._ranks):
            if TOPIC.format(number).encode().startswith(message[1:]):
                is_open = message[:1] == b"\x01"
                rank.subscriptions += 1 if is_open else -1
                rank.subscribed += is_open

    def _announcement(self, message: bytes) -> None:
        text = message.decode("utf-8", "replace").strip()
        if text.startswith("ack|"):  # later trainers also say which step they have used up
            return
        if not text.isdecimal() or int(text) >= len(self._ranks):
            what = f"a trainer announced itself as data rank {text[:40]!r}, and data_world_size is {len(self._ranks)}"
            fix = "set data_world_size to the number of data ranks of the trainer"
            raise BackendError(Problem(where="[backend.options] data_world_size", what=what, fix=fix))
        rank = self._ranks[int(text)]
        rank.announced += 1
        rank.owed = bool(self._payloads)
