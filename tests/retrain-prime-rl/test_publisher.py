"""The per-token wire over real sockets: late ranks, restarted ranks, full queues, a new life of our own process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import zmq

from retrain.api import BackendError, ConfigError
from retrain_prime_rl.options import PrimeRlOptions
from retrain_prime_rl.transport import Publisher

GENEROUS_S = 20.0


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


def test_each_rank_gets_its_own_payload_and_nobody_elses(publisher, receivers):
    sender, ranks = publisher(), [receivers(0), receivers(1)]
    for step in range(3):
        sender.send(step, [b"left %d" % step, b"right %d" % step])
    for step in range(3):
        assert [rank.receive() for rank in ranks] == [b"left %d" % step, b"right %d" % step]


def test_ranks_that_join_late_lose_nothing(publisher, receivers):
    sender, joined = publisher(), []
    for number, delay_s in ((1, 0.2), (0, 0.6)):
        threading.Timer(delay_s, lambda number=number: joined.append(receivers(number))).start()
    sender.send(0, [b"left", b"right"])
    received = {rank.rank: rank.receive() for rank in joined}
    assert received == {0: b"left", 1: b"right"}


def test_an_announcement_without_a_subscription_is_not_enough(publisher, receivers, free_ports):
    sender = publisher(1, ready_wait_s=0.5)
    context = zmq.Context()
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


def test_ranks_that_never_come_are_named(publisher, receivers):
    sender, _ = publisher(3, ready_wait_s=0.3), receivers(1)
    with pytest.raises(BackendError) as caught:
        sender.send(0, [b"x"] * 3)
    assert "data ranks 0, 2" in str(caught.value)
    assert "data_world_size" in str(caught.value)


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


def test_a_rank_beyond_the_data_world_is_refused(publisher, receivers):
    sender = publisher(1)
    receivers(4)
    with pytest.raises(BackendError, match="data rank '4', and data_world_size is 1"):
        sender.send(0, [b"x"])


def test_acknowledgements_of_later_trainers_do_no_harm(publisher, receivers):
    sender, rank = publisher(1), receivers(0)
    rank.say("ack|0|0")
    sender.send(0, [b"x"])
    assert rank.receive() == b"x"


def test_ports_in_use_are_a_config_error_that_leaves_nothing_open(publisher, free_ports):
    first = publisher(1)
    with pytest.raises(ConfigError) as caught:
        publisher(1)
    assert f":{free_ports}" in str(caught.value)
    first.close()
    publisher(1)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_address_that_is_not_ours_is_a_config_error(publisher, host):
    with pytest.raises(ConfigError, match="cannot be bound"):
        publisher(1, zmq_host=host)


def test_closing_twice_is_safe_and_what_was_sent_still_arrives(publisher, receivers):
    sender, rank = publisher(1), receivers(0)
    sender.send(0, [b"x" * 10**6])
    sender.close()
    sender.close()
    assert rank.receive() == b"x" * 10**6
