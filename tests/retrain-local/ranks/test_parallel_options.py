from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from retrain.api import Config
from retrain_local.checks import parallel_problems, staleness_problems
from retrain_local.devices.torch_devices import choose_devices
from retrain_local.options import LocalOptions

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
