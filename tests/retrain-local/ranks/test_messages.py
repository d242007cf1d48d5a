from __future__ import annotations

import pickle
from collections.abc import Callable
from multiprocessing import Pipe

import pytest

from retrain.api import Config, Seeds
from retrain_local.devices.group import PeerFailedError
from retrain_local.options import LocalOptions
from retrain_local.ranks.workers import Start, receive, send


def test_a_configuration_arrives_whole_with_the_tables_that_several_plugins_make(
    make_config: Callable[..., Config],
) -> None:
    config = make_config(model={"lora_rank": 8, "dtype": "fp32"}, entropy={"coef": 0.5})
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(config)  # what the messages know more than pickle
    start = Start(rank=1, size=2, port=3, threads=1, config=config, seeds=Seeds(7), params=LocalOptions(), stop_id=None)
    ours, theirs = Pipe()
    send(ours, start)
    found = receive(theirs)
    assert found.config.as_dict() == config.as_dict()
    assert found.config.model.lora_rank == 8
    assert found.config.value("entropy.coef", 0.0) == 0.5
    assert found.config.value("model.dtype", "") == "fp32"
    assert found.config.place("model.dtype") == config.place("model.dtype")
    assert (found.seeds, found.params) == (start.seeds, start.params)


def test_a_closed_end_is_noticed() -> None:
    ours, theirs = Pipe()
    theirs.close()
    with pytest.raises((EOFError, ConnectionError)):
        receive(ours)
    with pytest.raises(BrokenPipeError):
        send(ours, "x")


def test_an_error_of_a_peer_survives_the_way() -> None:
    error = pickle.loads(pickle.dumps(PeerFailedError(3, "ValueError: x")))
    assert (error.rank, str(error)) == (3, str(PeerFailedError(3, "ValueError: x")))
