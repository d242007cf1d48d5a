"""Steps over the wire: as files that appear whole, and over real sockets to late, restarted and slow receivers."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zmq

from retrain.api import BackendError, ConfigError
from retrain_prime_rl.options import PrimeRlOptions
from retrain_prime_rl.transport import FileTransport, Publisher, Pusher, rank_files
from tests.kit.problems import codes_in

GENEROUS_S = 20.0
KILLED = """
import os, signal, sys
from pathlib import Path
os.rename = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
from retrain_prime_rl.transport import FileTransport, rank_files
FileTransport(Path(sys.argv[1]), rank_files(2)).send(0, [b"a", b"b"])
"""


def step(folder: Path, number: int) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (folder / "rollouts" / f"step_{number}").iterdir()}


def test_each_rank_has_a_file_and_newer_trainers_find_the_same_in_batches(tmp_path):
    transport = FileTransport(tmp_path, rank_files(2))
    for number in (2, 3):
        transport.send(number, [b"left", b"right"])
    assert step(tmp_path, 3) == {"rank_0.bin": b"left", "rank_1.bin": b"right"}
    assert (tmp_path / "batches" / "step_3" / "rank_0.bin").read_bytes() == b"left"
    transport.forget(3)
    assert [path.name for path in (tmp_path / "batches").iterdir()] == ["step_3"]


def test_a_process_killed_while_writing_leaves_no_step_and_the_next_one_writes_it(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -9
    assert not (tmp_path / "rollouts" / "step_0").exists()
    FileTransport(tmp_path, rank_files(2)).send(0, [b"c", b"d"])
    assert step(tmp_path, 0) == {"rank_0.bin": b"c", "rank_1.bin": b"d"}


def test_a_step_that_another_process_has_sent_is_not_overwritten_and_a_disk_that_refuses_is_named(tmp_path):
    FileTransport(tmp_path, rank_files(1)).send(0, [b"theirs"])
    with pytest.raises(BackendError) as caught:
        FileTransport(tmp_path, rank_files(1)).send(0, [b"ours"])
    assert codes_in(caught) == ["prime-rl.two-runs"]
    assert step(tmp_path, 0) == {"rank_0.bin": b"theirs"}
    (tmp_path / "full" / "rollouts").parent.mkdir()
    (tmp_path / "full" / "rollouts").write_text("a file where a folder should be")
    with pytest.raises(BackendError, match=str(tmp_path / "full" / "rollouts" / "step_0")):
        FileTransport(tmp_path / "full", rank_files(1)).send(0, [b"x"])


# ---------------------------------------------------------------- the older wire: the packer binds, we connect


@pytest.fixture
def packer(free_ports):
    """Binds like a packer; returns a function that receives one message."""
    context = zmq.Context()
    socket = context.socket(zmq.PULL)

    def bind() -> None:
        socket.bind(f"tcp://127.0.0.1:{free_ports}")

    def receive() -> list[bytes]:
        assert socket.poll(20_000)
        return socket.recv_multipart()

    yield bind, receive
    socket.close(linger=0)
    context.term()


@pytest.fixture
def pusher(free_ports) -> Iterator[Callable[..., Pusher]]:
    opened: list[Pusher] = []

    def make(**options: object) -> Pusher:
        given = {"zmq_host": "127.0.0.1", "zmq_port": free_ports, "ready_wait_s": GENEROUS_S} | options
        opened.append(Pusher(PrimeRlOptions(**given), sender="run_a"))
        return opened[-1]

    yield make
    for one in opened:
        one.close()
        one.close()


@pytest.mark.parametrize("delay_s", [0.0, 0.4])
def test_a_batch_travels_with_the_name_of_its_run_however_late_the_packer_starts(packer, pusher, delay_s):
    bind, receive = packer
    threading.Timer(delay_s, bind).start()
    pusher().send(0, [b"batch"])
    assert receive() == [b"run_a", b"batch"]


def test_no_packer_and_an_address_that_is_none_are_told(pusher, free_ports):
    with pytest.raises(BackendError, match=f"no packer at tcp://127.0.0.1:{free_ports} took step 5"):
        pusher(ready_wait_s=0.1).send(5, [b"batch"])
    with pytest.raises(ConfigError):
        pusher(zmq_host="not a host")


# ---------------------------------------------------------------- the per-token wire


@dataclass
class Receiver:
    """A data rank as the description has it: SUB on the port, one message to the next one."""

    rank: int
    port: int
    announces: bool = True
    hwm: int = 10
    context: zmq.Context = field(default_factory=zmq.Context)

    def __post_init__(self) -> None:
        self.batches = self.context.socket(zmq.SUB)
        self.batches.setsockopt(zmq.RCVHWM, self.hwm)
        self.batches.connect(f"tcp://127.0.0.1:{self.port}")
        self.batches.setsockopt(zmq.SUBSCRIBE, b"data_rank|%d|" % self.rank)
        self.ready = self.context.socket(zmq.PUSH)
        self.ready.connect(f"tcp://127.0.0.1:{self.port + 1}")
        if self.announces:
            self.say(str(self.rank))

    def say(self, text: str) -> None:
        self.ready.send(text.encode())

    def receive(self, timeout_s: float = GENEROUS_S) -> bytes | None:
        if not self.batches.poll(timeout_s * 1000):
            return None
        topic, payload = self.batches.recv_multipart()
        assert topic == b"data_rank|%d|" % self.rank
        return payload

    def close(self) -> None:
        self.batches.close(linger=0)
        self.ready.close(linger=1000)
        self.context.term()


@pytest.fixture
def receivers(free_ports: int) -> Iterator[Callable[..., Receiver]]:
    opened: list[Receiver] = []

    def receiver(rank: int, **options: object) -> Receiver:
        opened.append(Receiver(rank=rank, port=free_ports, **options))
        return opened[-1]

    yield receiver
    for one in opened:
        if not one.context.closed:
            one.close()


@pytest.fixture
def publisher(free_ports: int) -> Iterator[Callable[..., Publisher]]:
    opened: list[Publisher] = []

    def make(ranks: int = 2, **options: object) -> Publisher:
        own = {name: options.pop(name) for name in ("is_resumed", "check_stop") if name in options}
        given = {"zmq_port": free_ports, "ready_wait_s": GENEROUS_S, "data_world_size": ranks} | options
        opened.append(Publisher(PrimeRlOptions(**given), **own))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def tend_until(publisher: Publisher, condition: Callable[[], object]) -> None:
    end = time.monotonic() + GENEROUS_S
    while not condition():
        assert time.monotonic() < end, "never happened"
        publisher.serve_ranks()
        time.sleep(0.01)


def test_each_rank_gets_its_own_payload_and_nobody_elses_even_after_the_end(publisher, receivers):
    sender, ranks = publisher(), [receivers(0), receivers(1)]
    ranks[0].say("ack|0|0")  # as later trainers do
    for step in range(3):
        sender.send(step, [b"left %d" % step, b"right %d" % step])
    sender.send(3, [b"x" * 10**6] * 2)
    sender.close()
    sender.close()
    for step in range(3):
        assert [rank.receive() for rank in ranks] == [b"left %d" % step, b"right %d" % step]
    assert [rank.receive() for rank in ranks] == [b"x" * 10**6] * 2


def test_an_announcement_without_a_subscription_is_not_enough(publisher, receivers, free_ports):
    sender, context = publisher(1, ready_wait_s=0.5), zmq.Context()
    ready = context.socket(zmq.PUSH)
    ready.connect(f"tcp://127.0.0.1:{free_ports + 1}")
    ready.send(b"0")
    with pytest.raises(BackendError, match="data ranks 0 of the trainer are not ready for step"):
        sender.send(0, [b"x"])
    late = receivers(0, announces=False)
    sender.send(0, [b"x"])  # the announcement still counts
    assert late.receive() == b"x"
    ready.close(linger=0)
    context.term()


def test_ranks_that_never_come_or_that_the_data_world_does_not_have_are_named(publisher, receivers):
    sender, _ = publisher(3, ready_wait_s=0.2), receivers(1)
    with pytest.raises(BackendError, match=r"(?s)data ranks 0, 2.*data_world_size"):
        sender.send(0, [b"x"] * 3)
    receivers(4)
    with pytest.raises(BackendError, match="data rank '4', and data_world_size is 3"):
        tend_until(sender, lambda: False)


def test_a_stop_is_heeded_while_ranks_are_waited_for(publisher):
    class StopHere(BaseException):
        pass

    def stop() -> None:
        raise StopHere

    with pytest.raises(StopHere):
        publisher(check_stop=stop).send(0, [b"x", b"y"])


def test_a_rank_restarted_while_its_step_is_under_way_gets_it_again_and_the_others_do_not(publisher, receivers):
    sender, first, other = publisher(), receivers(0), receivers(1)
    sender.send(0, [b"left", b"right"])
    assert (first.receive(), other.receive()) == (b"left", b"right")
    first.close()  # dies with the step in its hands
    second = receivers(0)
    tend_until(sender, lambda: second.batches.poll(0))
    assert second.receive() == b"left"
    sender.send(1, [b"left 1", b"right 1"])
    assert second.receive() == b"left 1"
    assert other.receive() == b"right 1"  # not `right` a second time


def test_a_rank_that_is_away_when_the_next_step_comes_is_waited_for(publisher, receivers):
    sender, first, other = publisher(), receivers(0), receivers(1)
    sender.send(0, [b"left", b"right"])
    assert first.receive() == b"left"
    first.close()
    tend_until(sender, lambda: sender._ranks[0].subscriptions == 0)
    joined = []
    threading.Timer(0.3, lambda: joined.append(receivers(0))).start()
    sender.send(1, [b"left 1", b"right 1"])
    assert joined[0].receive() == b"left 1"
    assert [other.receive(), other.receive()] == [b"right", b"right 1"]


def test_after_a_restart_of_ours_the_ranks_that_wait_are_found_without_announcing_themselves(publisher, receivers):
    sender, rank = publisher(1), receivers(0)
    sender.send(0, [b"before"])
    assert rank.receive() == b"before"
    sender.close()
    received: list[bytes | None] = []
    waiting = threading.Thread(target=lambda: received.append(rank.receive()))
    waiting.start()  # a socket subscribes anew only while its owner waits at it, as a trainer does
    again = publisher(1, is_resumed=True)
    again.send(1, [b"after"])
    waiting.join()
    assert received == [b"after"]


def test_a_full_queue_is_an_error_and_not_a_lost_batch(publisher, receivers):
    payload = b"x" * 2**20
    sender, rank = publisher(1, zmq_hwm=1, ready_wait_s=1.0), receivers(0, hwm=1)
    sent = []

    def flood() -> None:
        for step in range(200):  # until the buffers of the system are full too
            sender.send(step, [payload])
            sent.append(step)

    with pytest.raises(BackendError, match="does not receive: zmq_hwm messages are queued"):
        flood()
    for _ in sent:
        assert rank.receive() == payload
    assert rank.receive(0.2) is None


def test_ports_in_use_and_addresses_that_are_not_ours_are_a_config_error_that_leaves_nothing_open(
    publisher, free_ports
):
    first = publisher(1)
    with pytest.raises(ConfigError, match=f":{free_ports}"):
        publisher(1)
    first.close()
    for host in ("no.such.host.invalid", "203.0.113.7"):
        with pytest.raises(ConfigError, match="cannot be bound"):
            publisher(1, zmq_host=host)
    publisher(1)
