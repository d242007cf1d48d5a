"""Steps over ZeroMQ: a publisher for the per-token wire, a pusher for the older one.

A PUB socket silently drops messages to a rank that has not subscribed yet or whose queue is full. An XPUB socket looks
the same to subscribers, but reports subscriptions and refuses instead of dropping.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from retrain.api import BackendError, ConfigError, Problem
from retrain_prime_rl.options import PrimeRlOptions
from retrain_prime_rl.transport import Transport

LOG = logging.getLogger("retrain")
TOPIC = "data_rank|{}|"
LINGER_MS = 2000
POLL_MS = 50  # between two attempts, or two checks for a stop
WHERE = "[backend.options] zmq_port"


@dataclass(slots=True, kw_only=True)
class Rank:
    """State of a rank. A restarted rank announces itself again."""

    subscriptions: int = 0  # currently open
    subscribed: int = 0  # in total
    announced: int = 0  # number of announcements
    needs_resend: bool = False  # restarted after the step was sent, and has not received it

    def is_ready(self, *, is_known: bool) -> bool:
        """Whether a message sent now will reach it: it has announced itself and its latest subscription has arrived.

        A rank already known before a resume (`is_known`) does not announce itself again.
        """
        return self.subscriptions > 0 and self.subscribed >= self.announced >= (not is_known)


def _sent(
    socket: zmq.Socket[bytes], message: list[bytes], deadline: float, meanwhile: Callable[[], None] = lambda: None
) -> bool:
    """True once the socket has taken the message, False if it did not before the deadline."""
    while True:
        try:
            socket.send_multipart(message, flags=zmq.DONTWAIT)
            return True
        except zmq.Again:
            if time.monotonic() >= deadline:
                return False
            meanwhile()
            time.sleep(POLL_MS / 1000)


class Publisher(Transport):
    """Binds `port` for batches (topic `data_rank|<R>|`) and `port + 1` for one message per rank, its number as text."""

    def __init__(
        self,
        options: PrimeRlOptions,
        *,
        is_resumed: bool = False,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._ranks = [Rank() for _ in range(options.data_world_size)]
        self._is_known = is_resumed
        self._step = -1
        self._wait_s = options.ready_wait_s
        self._check_stop = check_stop
        self._payloads: Sequence[bytes] = ()
        self._context = zmq.Context()
        self._batches = self._context.socket(zmq.XPUB)
        self._batches.setsockopt(zmq.SNDHWM, options.zmq_hwm)
        self._batches.setsockopt(zmq.XPUB_VERBOSER, 1)  # report the subscription of a restarted rank as well
        self._batches.setsockopt(zmq.XPUB_NODROP, 1)
        self._ready = self._context.socket(zmq.PULL)
        self._ready.setsockopt(zmq.RCVHWM, options.zmq_hwm)
        for number, socket in enumerate((self._batches, self._ready), start=options.zmq_port):
            host = "127.0.0.1" if options.zmq_host == "localhost" else options.zmq_host
            try:
                socket.bind(f"tcp://{host}:{number}")
            except zmq.ZMQError as error:
                self.close()
                what = f"tcp://{host}:{number} cannot be bound: {error.strerror}"
                fix = "set zmq_host to an address of this machine, and zmq_port so that it and the next port are free"
                raise ConfigError(Problem(where=WHERE, what=what, fix=fix)) from error

    def send(self, step: int, payloads: Sequence[bytes]) -> None:
        """Publish a step once all ranks are ready; BackendError names those that are not."""
        deadline = time.monotonic() + self._wait_s
        self._await_ranks(step, deadline)
        self._step, self._payloads = step, tuple(payloads)
        for rank, payload in enumerate(payloads):
            self._publish(rank, payload, deadline)

    def serve_ranks(self) -> None:
        """Resend the step to every rank that was restarted after receiving it."""
        self._listen()
        for number, rank in enumerate(self._ranks):
            if rank.needs_resend and rank.is_ready(is_known=False):
                LOG.warning("Data rank %d was restarted: resending the current step.", number)
                self._publish(number, self._payloads[number], time.monotonic())
                rank.needs_resend = False

    def close(self) -> None:
        if not self._context.closed:
            self._batches.close(linger=LINGER_MS)
            self._ready.close(linger=0)
            self._context.term()

    def _await_ranks(self, step: int, deadline: float) -> None:
        self._listen()
        is_announced = False
        while missing := [str(n) for n, rank in enumerate(self._ranks) if not rank.is_ready(is_known=self._is_known)]:
            if not is_announced:
                LOG.info("Waiting for data ranks %s of the trainer ...", ", ".join(missing))
            is_announced = True
            if time.monotonic() >= deadline:
                what = f"data ranks {', '.join(missing)} of the trainer are not ready for step {step}"
                why = f"waited {self._wait_s:g} s for {len(self._ranks)} ranks"
                fix = (
                    'start the trainer with [rollout_transport] type = "zmq" and this port, and as many data ranks as '
                    "data_world_size, or raise ready_wait_s; a trainer set to files waits for rollouts/ instead"
                )
                raise BackendError(Problem(where=WHERE, what=what, why=why, fix=fix))
            self._check_stop()  # nothing of this step has been sent yet
            self._ready.poll(POLL_MS)
            self._listen()
        for rank in self._ranks:
            rank.needs_resend = False  # the step is yet to be sent

    def _publish(self, rank: int, payload: bytes, deadline: float) -> None:
        if not _sent(self._batches, [TOPIC.format(rank).encode(), payload], deadline):
            what = f"data rank {rank} does not receive: zmq_hwm messages are queued for it"
            fix = "find out why the trainer hangs, then resume the run"
            raise BackendError(Problem(where=f"step {self._step}", what=what, fix=fix))

    def _listen(self) -> None:
        """Process every subscription and announcement received so far."""
        while self._batches.poll(0):
            message = self._batches.recv()  # a byte, 1 to open and 0 to close, and the topic
            for number, rank in enumerate(self._ranks):
                if TOPIC.format(number).encode().startswith(message[1:]):
                    is_open = message[:1] == b"\x01"
                    rank.subscriptions += 1 if is_open else -1
                    rank.subscribed += is_open
        while self._ready.poll(0):
            self._announcement(self._ready.recv())

    def _announcement(self, message: bytes) -> None:
        text = message.decode("utf-8", "replace").strip()
        if text.startswith("ack|"):  # later trainers also acknowledge steps
            return
        if not text.isdecimal() or int(text) >= len(self._ranks):
            what = f"a trainer announced itself as data rank {text[:40]!r}, and data_world_size is {len(self._ranks)}"
            fix = "set data_world_size to the number of data ranks of the trainer"
            raise BackendError(Problem(where="[backend.options] data_world_size", what=what, fix=fix))
        rank = self._ranks[int(text)]
        rank.announced += 1
        rank.needs_resend = bool(self._payloads)


class Pusher(Transport):
    """Pushes (name of the run, batch) to `host:port`; only to a connected packer, so that nothing queues unseen."""

    def __init__(self, options: PrimeRlOptions, *, sender: str, check_stop: Callable[[], None] = lambda: None) -> None:
        self._address = f"tcp://{options.zmq_host}:{options.zmq_port}"
        self._sender = sender.encode()
        self._wait_s = options.ready_wait_s
        self._check_stop = check_stop
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, options.zmq_hwm)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        try:
            self._socket.connect(self._address)
        except zmq.ZMQError as error:
            self.close()
            what = f"{self._address} is not an address to connect to: {error.strerror}"
            raise ConfigError(Problem(where="[backend.options] zmq_host", what=what, fix="correct it")) from error

    def send(self, step: int, payloads: Sequence[bytes]) -> None:
        """Push the one payload of a step; BackendError when no packer takes it in time."""
        (payload,) = payloads
        # until it is taken nothing of this step has been sent, so the run may stop
        if not _sent(self._socket, [self._sender, payload], time.monotonic() + self._wait_s, self._check_stop):
            what = f"no packer at {self._address} took step {step} within {self._wait_s:g} s"
            fix = "start the trainer with this zmq host and port, or raise ready_wait_s"
            raise BackendError(Problem(where=WHERE, what=what, fix=fix))

    def close(self) -> None:
        if not self._context.closed:
            self._socket.close(linger=LINGER_MS)
            self._context.term()
