from __future__ import annotations

import pickle
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

import pytest

from retrain.api import Config, Seeds
from retrain_local.checks import parallel_problems, staleness_problems
from retrain_local.devices.group import PeerFailedError
from retrain_local.devices.torch_devices import choose_devices
from retrain_local.options import LocalOptions
from retrain_local.ranks.workers import Start, receive, send

MakeConfig = Callable[..., Config]


def of_ranks(make_config: MakeConfig, parallel: str, **tables: Any) -> Config:
    return make_config(backend={"devices": "cpu,cpu", "options": {"parallel": parallel}}, **tables)


def test_ranks_are_no_split_devices_and_one_device_is_no_rank(make_config: MakeConfig) -> None:
    devices = choose_devices(of_ranks(make_config, "replicate"))
    assert (len(devices.ranks), devices.is_split) == (2, False)
    assert devices.of_rank(1).trainer == devices.ranks[1]
    assert choose_devices(of_ranks(make_config, "split")).is_split
    assert not choose_devices(make_config(backend={"devices": "cpu", "options": {"parallel": "fsdp"}})).ranks


def test_fsdp_of_an_adapter_is_refused_by_name(make_config: MakeConfig) -> None:
    (problem,) = parallel_problems(of_ranks(make_config, "fsdp"))
    assert "'fsdp' does not go with an adapter" in problem.what
    assert not parallel_problems(of_ranks(make_config, "fsdp", model={"lora_rank": 0}))
    assert not parallel_problems(of_ranks(make_config, "replicate"))


def test_sampling_ahead_is_split_modes(make_config: MakeConfig) -> None:
    (problem,) = staleness_problems(of_ranks(make_config, "replicate", training={"max_staleness": 1}))
    assert problem.fix.startswith('set parallel to "split"')
    assert not staleness_problems(of_ranks(make_config, "split", training={"max_staleness": 1}))


@pytest.mark.parametrize(
    ("before", "now", "is_same"),
    [
        (("split", "cpu"), ("replicate", "cpu,cpu"), True),
        (("replicate", "cpu,cpu"), ("fsdp", "cpu,cpu,cpu"), True),
        (("replicate", "gpu:0,gpu:1"), ("split", "gpu:0"), True),
        (("replicate", "cpu,cpu"), ("replicate", "gpu:0,gpu:1"), False),
        (("split", "cpu,cpu"), ("replicate", "cpu,cpu"), False),
        (("split", "cpu"), ("split", "cpu,cpu"), False),
    ],
)
def test_a_resumed_run_may_have_other_ranks_but_not_another_mode(
    before: tuple[str, str], now: tuple[str, str], *, is_same: bool
) -> None:
    then, there = (LocalOptions(parallel=parallel).kept_on_resume(devices) for parallel, devices in (before, now))
    assert (then == there) is is_same


def test_other_options_must_stay() -> None:
    options = LocalOptions(parallel="replicate")
    changed = options.model_copy(update={"micro_batch_tokens": 99})
    assert options.kept_on_resume("cpu") != changed.kept_on_resume("cpu")


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
