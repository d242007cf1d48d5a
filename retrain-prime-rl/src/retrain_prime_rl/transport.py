"""Sends the payloads of a step to the trainer: the interface, and files on a shared disk."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import zmq

from retrain.api import BackendError, ConfigError, Problem
from retrain_prime_rl.options import PrimeRlOptions
from retrain_prime_rl.trainer_folder import BATCHES, ROLLOUTS, numbered

SCALAR_FILE = "rollouts.bin"
LOG = logging.getLogger("retrain")
TOPIC = "data_rank|{}|"
LINGER_MS = 2000  # for the last batch to leave a closed socket
POLL_MS = 50  # between two attempts, or two checks for a stop
WHERE = "[backend.options] zmq_port"


class Transport:
    """Carries steps to the trainer, each once and in order. Payload r is for data rank r; the older wire has one."""

    def send(self, step: int, payloads: Sequence[bytes]) -> None:
        raise NotImplementedError

    def serve_ranks(self) -> None:
        """Handle requests of the ranks; called repeatedly while waiting for the weights."""

    def forget(self, before: int) -> None:
        """Drop stored steps numbered below `before`: the trainer will not read them again."""

    def close(self) -> None:
        """Release sockets; idempotent."""


def rank_files(ranks: int) -> tuple[str, ...]:
    return tuple(f"rank_{rank}.bin" for rank in range(ranks))


class FileTransport(Transport):
    """`<output_dir>/rollouts/step_<N>/<name>`: a step appears with all its files at once, by one rename.

    `batches` links to the same folder.
    """

    def __init__(self, output_dir: Path, names: Sequence[str]) -> None:
        self._rollouts = output_dir / ROLLOUTS
        self._names = tuple(names)

    def send(self, step: int, payloads: Sequence[bytes]) -> None:
        target, draft = self._rollouts / f"step_{step}", self._rollouts / f".step_{step}.tmp"
        where = str(target)
        try:
            # A process that was killed while writing may have left it.
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            with suppress(FileExistsError):
                self._rollouts.with_name(BATCHES).symlink_to(ROLLOUTS, target_is_directory=True)
            for name, payload in zip(self._names, payloads, strict=True):
                with (draft / name).open("wb") as stream:
                    stream.write(payload)
                    stream.flush()
                    # The trainer may be another machine: the rename must not show it an empty file.
                    os.fsync(stream.fileno())
            # Fails if the target exists and is not empty, so a step of another process is never overwritten.
            os.rename(draft, target)
        except OSError as error:
            if target.exists():
                what = f"another process has sent step {step} to this trainer"
                fix = "give each run a separate output_dir and trainer"
                raise BackendError(Problem(code="prime-rl.two-runs", where=where, what=what, fix=fix)) from error
            what = f"step {step} could not be sent to the trainer: {error.strerror or error}"
            fix = "fix the disk, then resume the run"
            raise BackendError(Problem(code="prime-rl.not-sent", where=where, what=what, fix=fix)) from error

    def forget(self, before: int) -> None:
        """Remove their folders: the trainer removes its own broadcasts, but no batches."""
        for step, folder in numbered(self._rollouts).items():
            if step < before:
                shutil.rmtree(folder, ignore_errors=True)  # tried again after the next step


@dataclass(slots=True, kw_only=True)
class Rank:
    """State of a rank. A restarted rank announces itself again."""

    subscriptions: int = 0  # currently open
    subscribed: int = 0  # in total
    announced: int = 0  # number of announcements
    needs_resend: bool = False  # restarted after the step was sent, and has not received it

    def is_ready(self, *, is_known: bool) -> bool:
        """True if a message sent now will reach it: it has announced itself, and its latest subscription has arrived.

        A rank already known before a resume (`is_known`) does not announce itself again.
        """
        return self.subscriptions > 0 and self.subscribed >= self.announced >= (not is_known)


def _sent(
    socket: zmq.Socket[bytes], message: list[bytes], deadline: float, meanwhile: Callable[[], None] = lambda: None
) -> bool:
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
        self, options: PrimeRlOptions, *, is_resumed: bool = False, check_stop: Callable[[], None] = lambda: None
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
        # Report the subscription of a restarted rank as well.
        self._batches.setsockopt(zmq.XPUB_VERBOSER, 1)
        # At the high-water mark wait: by default the socket would drop the batch in silence.
        self._batches.setsockopt(zmq.XPUB_NODROP, 1)
        self._ready = self._context.socket(zmq.PULL)
        self._ready.setsockopt(zmq.RCVHWM, options.zmq_hwm)
        for number, socket in enumerate((self._batches, self._ready), start=options.zmq_port):
            # A socket binds to numeric addresses and interfaces, not to names of hosts.
            host = "127.0.0.1" if options.zmq_host == "localhost" else options.zmq_host
            try:
                socket.bind(f"tcp://{host}:{number}")
            except zmq.ZMQError as error:
                self.close()
                what = f"tcp://{host}:{number} cannot be bound: {error.strerror}"
                fix = "set zmq_host to an address of this machine, and zmq_port so that it and the next port are free"
                raise ConfigError(Problem(code="prime-rl.cannot-bind", where=WHERE, what=what, fix=fix)) from error

    def send(self, step: int, payloads: Sequence[bytes]) -> None:
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
                raise BackendError(Problem(code="prime-rl.ranks-not-ready", where=WHERE, what=what, why=why, fix=fix))
            # A stop is safe here: nothing of this step has been sent yet.
            self._check_stop()
            self._ready.poll(POLL_MS)
            self._listen()
        for rank in self._ranks:
            rank.needs_resend = False  # the step is yet to be sent

    def _publish(self, rank: int, payload: bytes, deadline: float) -> None:
        if not _sent(self._batches, [TOPIC.format(rank).encode(), payload], deadline):
            what = f"data rank {rank} does not receive: zmq_hwm messages are queued for it"
            fix = "find out why the trainer hangs, then resume the run"
            raise BackendError(Problem(code="prime-rl.trainer-hangs", where=f"step {self._step}", what=what, fix=fix))

    def _listen(self) -> None:
        while self._batches.poll(0):
            # One byte, 1 to subscribe and 0 to leave, and the topic.
            message = self._batches.recv()
            for number, rank in enumerate(self._ranks):
                if TOPIC.format(number).encode().startswith(message[1:]):
                    is_open = message[:1] == b"\x01"
                    rank.subscriptions += 1 if is_open else -1
                    rank.subscribed += is_open
        while self._ready.poll(0):
            text = self._ready.recv().decode("utf-8", "replace").strip()
            # Later trainers acknowledge steps on the same socket.
            if text.startswith("ack|"):
                continue
            if not text.isdecimal() or int(text) >= len(self._ranks):
                what = f"a trainer announced data rank {text[:40]!r}, and data_world_size is {len(self._ranks)}"
                fix = "set data_world_size to the number of data ranks of the trainer"
                where = "[backend.options] data_world_size"
                raise BackendError(Problem(code="prime-rl.unknown-rank", where=where, what=what, fix=fix))
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
            where, fix = "[backend.options] zmq_host", "set it to a host or address that this machine can reach"
            raise ConfigError(Problem(code="prime-rl.bad-address", where=where, what=what, fix=fix)) from error

    def send(self, step: int, payloads: Sequence[bytes]) -> None:
        (payload,) = payloads
        # until it is taken nothing of this step has been sent, so the run may stop
        if not _sent(self._socket, [self._sender, payload], time.monotonic() + self._wait_s, self._check_stop):
            what = f"no packer at {self._address} took step {step} within {self._wait_s:g} s"
            fix = "start the trainer with this zmq host and port, or raise ready_wait_s"
            raise BackendError(Problem(code="prime-rl.no-packer", where=WHERE, what=what, fix=fix))

    def close(self) -> None:
        if not self._context.closed:
            self._socket.close(linger=LINGER_MS)
            self._context.term()
