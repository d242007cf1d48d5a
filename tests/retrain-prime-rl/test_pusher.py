"""The older wire over a real socket: the packer binds, we connect."""

from __future__ import annotations

import threading

import pytest
import zmq

from retrain.api import BackendError, ConfigError
from retrain_prime_rl.options import PrimeRlOptions
from retrain_prime_rl.transport import Pusher


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


def pusher(port: int, **options: object) -> Pusher:
    own = {name: options.pop(name) for name in ("check_stop",) if name in options}
    given = {"zmq_host": "127.0.0.1", "zmq_port": port, "ready_wait_s": 20.0} | options
    return Pusher(PrimeRlOptions(**given), sender="run_a", **own)


def test_a_batch_travels_with_the_name_of_its_run(packer, free_ports):
    bind, receive = packer
    bind()
    sender = pusher(free_ports)
    sender.send(0, [b"batch"])
    assert receive() == [b"run_a", b"batch"]
    sender.close()
    sender.close()


def test_a_packer_that_starts_late_is_waited_for(packer, free_ports):
    bind, receive = packer
    threading.Timer(0.4, bind).start()
    sender = pusher(free_ports)
    sender.send(0, [b"batch"])
    assert receive() == [b"run_a", b"batch"]
    sender.close()


def test_no_packer_is_an_error_with_its_address(free_ports):
    sender = pusher(free_ports, ready_wait_s=0.3)
    with pytest.raises(BackendError, match=f"no packer at tcp://127.0.0.1:{free_ports} took step 5"):
        sender.send(5, [b"batch"])
    sender.close()


def test_an_address_that_is_none_is_a_config_error(free_ports):
    with pytest.raises(ConfigError):
        pusher(free_ports, zmq_host="not a host")
